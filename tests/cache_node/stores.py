"""A local S3 server (moto's), how NIXL finds it, and stores over a pool."""

from __future__ import annotations

import pytest
import torch

from kvrelay.cache_node.store import BlockFiles, BlockObjects
from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.checksums import sums_of
from kvrelay.kv_transfer.connector import PoolRegion

BLOCK_BYTES, SLOTS = 512, 64
IDENTITY = b"i" * 16
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


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Store:
    """A store, and a pool of random blocks."""

    def __init__(self, place: str, identity: bytes = IDENTITY) -> None:
        memory = zeros(SLOTS * BLOCK_BYTES, torch.device("cpu"))
        self.memory = memory.view(SLOTS, BLOCK_BYTES)
        self.memory.random_(0, 256, generator=torch.Generator().manual_seed(1))
        region = PoolRegion(memory.data_ptr(), SLOTS, BLOCK_BYTES, "cpu")
        self.sums = sums_of(region, 2)
        kind = BlockObjects if "://" in place else BlockFiles
        self.blocks = kind(place, identity, region, self.sums)
