"""Fixtures of the router's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from router_doubles import SPEAKS


@pytest.fixture(params=["stream", "http"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """NodeClient over leg streams, and over HTTP."""
    SPEAKS["legs"] = request.param == "stream"
    yield
    SPEAKS["legs"] = True
