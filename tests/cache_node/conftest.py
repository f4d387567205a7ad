"""Fixtures for tests of the cache process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stores

from kvrelay.cache_node import store_tier


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a store the time that it takes on a busy machine."""
    monkeypatch.setattr(store_tier, "DEADLINE_S", 100.0)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.S3]:
    pytest.importorskip("nixl_cu12")
    server = stores.S3()
    stores.use(monkeypatch, server.port)
    yield server
    server.close()
