"""Fixtures for tests of the cache process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import s3_server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.S3]:
    pytest.importorskip("nixl_cu12")
    server = s3_server.S3()
    s3_server.use(monkeypatch, server.port)
    yield server
    server.close()
