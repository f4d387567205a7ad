"""Fixtures for tests of the cache process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stores


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.S3]:
    pytest.importorskip("nixl_cu12")
    server = stores.S3()
    stores.use(monkeypatch, server.port)
    yield server
    server.close()
