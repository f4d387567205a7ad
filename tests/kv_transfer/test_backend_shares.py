"""Every backend reads a share of each block: between pools whose blocks hold different heads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch
from engine_node import RealNode, real_backend

from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer import direct
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.shares import Heads, shares

BLOCKS, HEADS, HEAD_BYTES = 12, 4, 4096


class Rank:
    """A pool of some heads, and a backend over it. `pool` is uint8 [blocks, heads, HEAD_BYTES]."""

    def __init__(self, name: str, kind: str, heads: Heads, device: str) -> None:
        self.name, self.heads = name, heads
        size = heads[1] - heads[0]
        settings = {"slice_bytes": HEAD_BYTES + 1000} if kind == "nccl" else {}
        self.memory = zeros(BLOCKS * size * HEAD_BYTES, torch.device(device))
        self.pool = self.memory.view(BLOCKS, size, HEAD_BYTES)
        self.region = PoolRegion(self.memory.data_ptr(), BLOCKS, size * HEAD_BYTES, device)
        self.backend = real_backend(name, kind, self.region, **settings)
        self.backend.prepare()
        self.metadata = self.backend.open()


def engine(name: str, kind: str, size: int, device: str) -> list[Rank]:
    each = HEADS // size
    return [
        Rank(f"{name}{rank}", kind, (rank * each, rank * each + each), device)
        for rank in range(size)
    ]


@pytest.fixture(params=["direct", "nixl", "nccl"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl")
    return str(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, kind: str) -> str:
    if request.param != "cpu" and kind in ("direct", "nccl"):
        pytest.skip(
            "one process cannot map its own memory by CUDA IPC, nor be two ranks of NCCL on one GPU"
        )
    return str(request.param)


@pytest.fixture
def engines(
    kind: str, device: str, request: pytest.FixtureRequest
) -> Iterator[tuple[list[Rank], list[Rank]]]:
    here, there = (
        engine(name, kind, size, device)
        for name, size in zip(("reader", "source"), request.param, strict=True)
    )
    yield here, there
    for rank in (*here, *there):
        rank.backend.close()


@pytest.mark.parametrize("engines", [(1, 1), (1, 2), (2, 1), (4, 2), (1, 4)], indirect=True)
@pytest.mark.parametrize("step_bytes", [direct.STEP_BYTES, 3000])
def test_every_rank_gets_its_heads_and_nothing_else(engines, step_bytes, monkeypatch):
    monkeypatch.setattr(direct, "STEP_BYTES", step_bytes)
    here, there = engines
    whole = torch.randint(0, 256, (BLOCKS, HEADS, HEAD_BYTES), dtype=torch.uint8)
    for rank in there:
        rank.pool.copy_(whole[:, slice(*rank.heads)])
    remote, local = [3, 4, 5, 0, 11], [1, 2, 3, 9, 7]
    expected = torch.zeros_like(whole)
    expected[local] = whole[remote]
    running = []
    for index, reader in enumerate(here):
        found = shares(
            index, [rank.heads for rank in here], [rank.heads for rank in there], HEAD_BYTES
        )
        for source, share in found:
            peer = there[source]
            it = Source(peer.name, f"g/{source}", peer.region, peer.metadata, share)
            reader.backend.add_peer(it)
            running.append((reader, reader.backend.post_read(it, remote, local)))
    deadline = time.monotonic() + 20
    while running:
        assert time.monotonic() < deadline
        running = [
            (reader, handle) for reader, handle in running if not reader.backend.poll(handle)
        ]
        for rank in there:
            rank.backend.progress()
    for reader in here:
        assert torch.equal(reader.pool.cpu(), expected[:, slice(*reader.heads)])


@pytest.mark.parametrize("kind", ["direct", "nixl"])
def test_an_idle_connector_costs_no_cpu(kind):
    """A progress thread of its own would take half a second."""
    if kind == "nixl":
        pytest.importorskip("nixl")
    with contextlib.closing(RealNode("idle", kind)) as node:
        node.engine.offer("r", [1], 16)  # somebody may read
        before = time.process_time()
        node.woken.wait(0.5)
        assert time.process_time() - before < 0.2
