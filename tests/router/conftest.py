"""Fixtures of the router's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from router_doubles import SPEAKS


@pytest.fixture(params=["stream", "http"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Requests over node streams, and over HTTP."""
    SPEAKS["legs"] = request.param == "stream"
    yield
    SPEAKS["legs"] = True
