"""A local S3 server (moto's), and how NIXL finds it."""

from __future__ import annotations

import pytest

BUCKET = "kvrelay-test"
USER = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3:
    def __init__(self) -> None:
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        self._backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._backend.reset()
        self._backend.create_bucket(BUCKET, "us-east-1")

    def put(self, path: str, content: bytes) -> None:
        self._backend.put_object(BUCKET, path, content)

    def close(self) -> None:
        self._server.stop()


def use(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for variable, value in (USER | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}).items():
        monkeypatch.setenv(variable, value)
