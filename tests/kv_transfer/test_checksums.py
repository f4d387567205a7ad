"""Checksums over real pools: the thread, several ranks, and connectors whose data plane delivers
what it should not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from peer_process import CONFIG
from real_node import RealNode

from kvrelay.kernels import block_checksums
from kvrelay.kernels.block_checksums import keys
from kvrelay.kv_transfer.backend import TransferBackend
from kvrelay.kv_transfer.checksums import Checksums
from kvrelay.kv_transfer.connector import (
    Completion,
    Event,
    Fetched,
    FetchFailed,
    PoolRegion,
    Settled,
)
from kvrelay.kv_transfer.messages import Follow, Message
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError

BLOCKS, BLOCK_BYTES, HEADS = 32, 64 << 10, 2
DEADLINE_S = 30.0
PATIENT = TransferConfig(lease_s=20.0, heartbeat_s=0.5, transfer_deadline_s=60.0, kv_checksums=1.0)


def unbroken(error: Exception) -> None:
    raise error


def test_the_thread_sums_its_pool_and_ranks_are_joined_in_order() -> None:
    pool = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    region = PoolRegion(pool.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu")
    asked: list[tuple[int, Sequence[int]]] = []
    other = Checksums(region, HEADS, unbroken)
    ranks = Checksums(region, HEADS, unbroken, 2, lambda _, *question: asked.append(question))
    found: list[list[bytes]] = []
    done = threading.Event()
    try:
        ranks.ask([3, 7], lambda sums: (found.append(sums), done.set()))  # type: ignore[func-returns-value]
        ((number, blocks),) = asked
        other.ask(blocks, lambda sums: ranks.answer(1, number, sums))
        assert done.wait(DEADLINE_S)
    finally:
        ranks.close(5)
        other.close(5)
    words = pool.view(torch.int64).view(BLOCKS, HEADS, -1)
    expected = block_checksums.block_checksums(words.numpy(), [3, 7], keys(words.shape[2]))
    packed = [row.astype("<i8").tobytes() for row in expected]
    assert found == [[of_block * 2 for of_block in packed]]


def test_a_block_that_cannot_be_cut_into_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="block of 100 bytes has 3 heads; leave kv_checksums out"):
        Checksums(PoolRegion(0, 1, 100, "cpu"), 3, unbroken)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 256])
def test_a_gpu_pool_has_the_checksums_of_its_twin(count: int) -> None:
    """Twice: the second question finds what the first has left in pinned memory."""
    pool = torch.randint(0, 256, (300, BLOCK_BYTES), dtype=torch.uint8)
    there = pool.to("cuda:0")
    torch.cuda.synchronize()
    thread = Checksums(PoolRegion(there.data_ptr(), 300, BLOCK_BYTES, "cuda:0"), HEADS, unbroken)
    words = pool.view(torch.int64).view(300, HEADS, -1).numpy()
    try:
        for _ in range(2):
            blocks = torch.randperm(300)[:count].tolist()
            found: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
            thread.ask(blocks, found.put)
            expected = block_checksums.block_checksums(words, blocks, keys(words.shape[2]))
            assert found.get(timeout=DEADLINE_S) == [
                row.astype("<i8").tobytes() for row in expected
            ]
    finally:
        thread.close(5)


class HeldSums:
    """Sums that wait until `gate` is open; `sums` says how many were begun, `begun` that one was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sums, self.begun, self.gate = 0, threading.Event(), threading.Event()
        real = block_checksums.block_checksums

        def held(*arguments: Any) -> Any:
            self.sums += 1
            self.begun.set()
            assert self.gate.wait(DEADLINE_S)
            return real(*arguments)

        monkeypatch.setattr(block_checksums, "block_checksums", held)


def test_a_sum_that_hangs_is_told_and_nothing_behind_it_is_begun_when_the_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldSums(monkeypatch)
    pool = torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    thread = Checksums(PoolRegion(pool.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu"), HEADS, unbroken)
    assert thread.silent_s() == 0
    found: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    for block in range(3):
        thread.ask([block], found.put)
    assert held.begun.wait(DEADLINE_S)
    assert 0 < thread.silent_s() < DEADLINE_S
    thread.close(0)
    held.gate.set()
    thread.close(DEADLINE_S)
    assert (held.sums, found.qsize()) == (1, 1)
    assert thread.silent_s() == 0


def test_a_connector_says_how_long_its_sums_have_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Checksums, "silent_s", lambda thread: 77.0)
    node = RealNode("node", "direct", BLOCKS, BLOCK_BYTES, config=PATIENT)
    try:
        assert node.desk.stats().silent_s == 77.0
    finally:
        node.desk.close()


class FaultyPlane:
    """Delivers something else, once, when `fault` is set."""

    def __init__(self, plane: TransferBackend, pool: torch.Tensor) -> None:
        self._plane, self._pool = plane, pool
        self.fault = ""
        self.stale = pool.clone()
        """What the blocks held before anything was read."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._plane, name)

    def post_read(
        self, generation: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> object:
        return self._plane.post_read(generation, remote_blocks, local_blocks), list(local_blocks)

    def poll(self, handle: object) -> bool:
        real, blocks = cast("tuple[object, list[int]]", handle)
        if not self._plane.poll(real):
            return False
        if self.fault:
            fault, self.fault = self.fault, ""
            getattr(self, fault)(blocks)
        return True

    def flipped_bit(self, blocks: list[int]) -> None:
        self._pool[blocks[-1], BLOCK_BYTES // 3] ^= 64

    def shifted(self, blocks: list[int]) -> None:
        self._pool[blocks[0]] = self._pool[blocks[0]].roll(8)

    def swapped(self, blocks: list[int]) -> None:
        self._pool[blocks[:2]] = self._pool[[blocks[1], blocks[0]]]

    def old(self, blocks: list[int]) -> None:
        self._pool[blocks[1]] = self.stale[blocks[1]]


class Pair:
    """A source and a reader whose plane can be at fault."""

    def __init__(
        self, kind: str, ours: TransferConfig = PATIENT, theirs: TransferConfig = PATIENT
    ) -> None:
        self.source = RealNode("source", kind, BLOCKS, BLOCK_BYTES, config=theirs)
        self.reader = RealNode("reader", kind, BLOCKS, BLOCK_BYTES, config=ours)
        self.source.pool[:] = torch.randint(0, 256, self.source.pool.shape, dtype=torch.uint8)
        self.reader.pool[:] = torch.randint(0, 256, self.reader.pool.shape, dtype=torch.uint8)
        self.fault = FaultyPlane(self.reader.plane._plane, self.reader.pool)
        self.reader.plane._plane = cast(TransferBackend, self.fault)

    def fetch(self, name: str, remote: list[int], local: list[int], events: int = 1) -> list[Event]:
        """To its end: Fetched, or with two events FetchFailed and Settled."""
        self.reader.desk.watch(name, self.source.desk.offer(name, remote, 1))
        self.reader.desk.fetch(name, remote, local)
        return self.reader.wait(events, DEADLINE_S)

    def close(self) -> None:
        self.reader.desk.close()
        self.source.desk.close()


@pytest.fixture(params=["direct", "nixl", "nccl"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "nixl":
        pytest.importorskip("nixl")
    it = Pair(request.param)
    yield it
    it.close()


@pytest.mark.parametrize("fault", ["flipped_bit", "shifted", "swapped", "old"])
def test_what_is_not_what_the_source_has_is_not_admitted(pair: Pair, fault: str) -> None:
    (fetched,) = pair.fetch("good", [1, 2, 3], [11, 12, 13])
    assert isinstance(fetched, Fetched)
    assert torch.equal(pair.reader.pool[11:14], pair.source.pool[1:4])
    assert pair.reader.desk.stats().checked_blocks == 3
    pair.fault.fault = fault
    failed, settled = pair.fetch("bad", [4, 5, 6, 7], [20, 21, 22, 23], events=2)
    assert isinstance(failed, FetchFailed)
    assert (failed.cause, failed.verified) == ("KvCorrupted", 0)
    assert settled == Settled("bad")
    stats = pair.reader.desk.stats()
    assert stats.checked_blocks == 7
    assert stats.wrong_blocks == (2 if fault == "swapped" else 1)
    assert dict(stats.failures) == {"KvCorrupted": 1}
    (fetched,) = pair.fetch("again", [4, 5, 6, 7], [20, 21, 22, 23])
    assert isinstance(fetched, Fetched)
    assert torch.equal(pair.reader.pool[20:24], pair.source.pool[4:8])
    assert len(pair.source.wait(3, DEADLINE_S)) == 3  # all leases are over


def test_many_blocks_of_a_growing_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several questions on both ends, while it grows."""
    for module in ("fetches", "peers", "chunk_progress"):
        monkeypatch.setattr(f"kvrelay.kv_transfer.{module}.MOST_BLOCKS", 3)
    pair = Pair("direct")
    try:
        blocks = list(range(1, 21))
        pair.reader.desk.watch("r", pair.source.desk.offer("r", blocks, 1, ready=0))
        pair.reader.desk.fetch("r", blocks, blocks[::-1])
        for ready in (1, 8, 15):
            pair.source.desk.grow("r", ready)
        pair.source.desk.complete("r", Completion([5]))
        (fetched,) = pair.reader.wait(1, DEADLINE_S)
        assert isinstance(fetched, Fetched)
        assert fetched.completion == Completion([5])
        assert pair.reader.desk.stats().checked_blocks == 20
        assert pair.reader.desk.stats().wrong_blocks == 0
    finally:
        pair.close()


def test_what_is_asked_again_while_it_is_summed_is_summed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    often = TransferConfig(
        lease_s=20.0, heartbeat_s=0.02, transfer_deadline_s=60.0, kv_checksums=1.0
    )
    held, asked = HeldSums(monkeypatch), threading.Semaphore(0)
    pair = Pair("direct", ours=often)
    answer = pair.source.desk.answer

    def counted(sender: bytes, message: Message) -> Message | None:
        if isinstance(message, Follow) and message.checksums:
            asked.release()
        return answer(sender, message)

    monkeypatch.setattr(pair.source.desk, "answer", counted)
    try:
        pair.reader.desk.watch("r", pair.source.desk.offer("r", [1, 2], 1))
        pair.reader.desk.fetch("r", [1, 2], [3, 4])
        for _ in range(5):
            assert asked.acquire(timeout=DEADLINE_S)
        held.gate.set()
        (fetched,) = pair.reader.wait(1, DEADLINE_S)
        assert isinstance(fetched, Fetched)
        assert held.sums == 2  # one on either end
    finally:
        held.gate.set()
        pair.close()


def test_an_undrawn_block_is_not_checked_and_a_source_that_does_not_check_is_counted() -> None:
    silent = TransferConfig(lease_s=20.0, heartbeat_s=0.5, transfer_deadline_s=60.0)
    for ours, theirs, counted in ((silent, PATIENT, (0, 0)), (PATIENT, silent, (0, 4))):
        pair = Pair("direct", ours, theirs)
        try:
            pair.fault.fault = "flipped_bit"
            (fetched,) = pair.fetch("bad", [4, 5, 6, 7], [20, 21, 22, 23])
            assert isinstance(fetched, Fetched)
            stats = pair.reader.desk.stats()
            assert (stats.checked_blocks, stats.unchecked_blocks) == counted
        finally:
            pair.close()


def test_the_share_is_a_share() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="kv_checksums must be between 0 and 1"):
            TransferConfig(kv_checksums=share)
    assert CONFIG.kv_checksums == 0
