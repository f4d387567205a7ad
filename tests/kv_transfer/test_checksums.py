"""Checksums: which blocks are drawn, the thread over a pool, and backends that deliver wrongly."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from engine_node import SLOW, RealNode

from kvrelay.kernels.block_checksums import block_checksums
from kvrelay.kv_transfer import checksums
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.checksums import Checksums, in_our_order
from kvrelay.kv_transfer.connector import (
    Completion,
    Event,
    Fetched,
    FetchFailed,
    PoolRegion,
    Settled,
)
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError

BLOCKS, BLOCK_BYTES, HEADS = 32, 64 << 10, 2
DEADLINE_S = 30.0
SILENT = replace(SLOW, heartbeat_s=0.5, transfer_deadline_s=60.0)
PATIENT = replace(SILENT, kv_checksums=1.0)


def test_the_share_of_blocks_is_checked(pair: Callable[..., Pair]) -> None:
    it, blocks = pair(ours=replace(SILENT, kv_checksums=0.5)), list(range(1, 31))
    for number in range(20):
        assert isinstance(it.fetch(str(number), blocks, blocks)[0], Fetched)
    assert 200 < it.reader.engine.stats().checked_blocks < 400


def test_checksums_of_too_few_heads_are_those_of_no_block() -> None:
    assert in_our_order(bytes(8), [0, 1]) == b""


def unbroken(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [1, 3, 256])
def test_the_thread_sums_its_pool(device: str, count: int) -> None:
    """Twice: the second question finds what the first has left in pinned memory."""
    pool = torch.randint(0, 256, (300, BLOCK_BYTES), dtype=torch.uint8)
    there = pool.to(device)
    if there.is_cuda:
        torch.cuda.synchronize()
    thread = Checksums(PoolRegion(there.data_ptr(), 300, BLOCK_BYTES, device), HEADS, unbroken)
    try:
        for _ in range(2):
            blocks = torch.randperm(300)[:count].tolist()
            found: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
            thread.ask(blocks, found.put)
            expected = [block_checksums(pool[block].numpy(), HEADS) for block in blocks]
            assert found.get(timeout=DEADLINE_S) == expected
    finally:
        thread.close(5)


def test_a_block_that_cannot_be_cut_into_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="block of 100 bytes has 3 heads; leave kv_checksums out"):
        Checksums(PoolRegion(0, 1, 100, "cpu"), 3, unbroken)


def test_a_sum_that_hangs_is_told_and_nothing_behind_it_is_begun_when_the_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, gate = queue.SimpleQueue[int](), threading.Event()

    def held(*_: object) -> bytes:
        begun.put(1)
        assert gate.wait(DEADLINE_S)
        return b""

    monkeypatch.setattr(checksums, "block_checksums", held)
    pool = torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    thread = Checksums(PoolRegion(pool.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu"), HEADS, unbroken)
    assert thread.silent_s() == 0
    found: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    for block in range(3):
        thread.ask([block], found.put)
    begun.get(timeout=DEADLINE_S)
    assert 0 < thread.silent_s() < DEADLINE_S
    thread.close(0)
    gate.set()
    thread.close(DEADLINE_S)
    assert (begun.qsize(), found.qsize()) == (0, 1)
    assert thread.silent_s() == 0


class FaultyBackend:
    """A backend that flips a bit of a READ's last block, once, if `faulty`."""

    def __init__(self, backend: Any, pool: torch.Tensor) -> None:
        self._backend, self._pool, self.faulty = backend, pool, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def post_read(self, source: Source, remote: Sequence[int], local: Sequence[int]) -> object:
        return self._backend.post_read(source, remote, local), local[-1]

    def poll(self, handle: object) -> bool:
        real, block = cast("tuple[object, int]", handle)
        if not self._backend.poll(real):
            return False
        self._pool[block, BLOCK_BYTES // 3] ^= 64 * self.faulty
        self.faulty = False
        return True


class Pair:
    """A source and a reader whose backend can be at fault."""

    def __init__(self, stack: ExitStack, kind: str, ours: TransferConfig, theirs: TransferConfig):
        self.source, self.reader = (
            stack.enter_context(closing(RealNode(name, kind, BLOCKS, BLOCK_BYTES, config=config)))
            for name, config in (("source", theirs), ("reader", ours))
        )
        for pool in (self.source.pool, self.reader.pool):
            pool[:] = torch.randint(0, 256, pool.shape, dtype=torch.uint8)
        self.fault = FaultyBackend(self.reader.backend._backend, self.reader.pool)
        self.reader.backend._backend = self.fault

    def fetch(self, name: str, remote: list[int], local: list[int], events: int = 1) -> list[Event]:
        """To its end: Fetched, or with two events FetchFailed and Settled."""
        ticket = self.source.engine.offer(name, remote, 1)
        self.reader.fetch(name, ticket, remote, local)
        return self.reader.wait(events, DEADLINE_S)


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:
        yield lambda kind="direct", ours=PATIENT, theirs=PATIENT: Pair(stack, kind, ours, theirs)


@pytest.mark.parametrize("kind", ["direct", "nixl", "nccl"])
def test_what_is_not_what_the_source_has_is_not_admitted(
    pair: Callable[..., Pair], kind: str
) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl")
    it = pair(kind)
    assert isinstance(it.fetch("good", [1, 2, 3], [11, 12, 13])[0], Fetched)
    assert torch.equal(it.reader.pool[11:14], it.source.pool[1:4])
    assert it.reader.engine.stats().checked_blocks == 3
    it.fault.faulty = True
    failed, settled = it.fetch("bad", [4, 5, 6, 7], [20, 21, 22, 23], events=2)
    assert isinstance(failed, FetchFailed)
    assert (failed.cause, failed.verified) == ("KvCorrupted", 0)
    assert settled == Settled("bad")
    stats = it.reader.engine.stats()
    assert (stats.checked_blocks, stats.wrong_blocks) == (7, 1)
    assert stats.failures == {"KvCorrupted": 1}
    assert isinstance(it.fetch("again", [4, 5, 6, 7], [20, 21, 22, 23])[0], Fetched)
    assert torch.equal(it.reader.pool[20:24], it.source.pool[4:8])
    assert len(it.source.wait(3, DEADLINE_S)) == 3  # all leases are over


def test_many_blocks_of_a_growing_ticket(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several questions on both ends, while it grows."""
    for module in ("fetches", "offers"):
        monkeypatch.setattr(f"kvrelay.kv_transfer.{module}.MOST_BLOCKS", 3)
    it, blocks = pair(), list(range(1, 21))
    it.reader.fetch("r", it.source.engine.offer("r", blocks, 1, ready=0), blocks, blocks[::-1])
    for ready in (1, 8, 15):
        it.source.engine.grow("r", ready)
    it.source.engine.complete("r", Completion([5]))
    (fetched,) = it.reader.wait(1, DEADLINE_S)
    assert isinstance(fetched, Fetched)
    assert fetched.completion == Completion([5])
    stats = it.reader.engine.stats()
    assert (stats.checked_blocks, stats.wrong_blocks) == (20, 0)


def test_the_engine_tells_how_long_a_sum_hangs(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checksums, "silent_s", lambda thread: 77.0)
    assert pair().source.engine.stats().silent_s == 77.0
