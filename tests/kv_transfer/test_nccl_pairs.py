"""A pair's conveyor belt over a communicator that the test moves by hand: what is ahead, and what
an abort leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from engine_node import wait_until

from kvrelay.kv_transfer import nccl_pairs
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.nccl_pairs import (
    STAGES,
    Ask,
    Budget,
    Meet,
    Pair,
    PairMessage,
    Part,
    ReaderPair,
    SourcePair,
    Terms,
    Transfer,
)
from kvrelay.kv_transfer.shares import Share
from kvrelay.kv_transfer.staging import Lane, StagedPool
from kvrelay.wire.errors import PeerLost

BLOCKS, BLOCK_BYTES = 32, 8
SLICE_BYTES = 2 * BLOCK_BYTES


class ScriptedWork:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.lost = False

    def __call__(self) -> None:
        assert self.over.wait(10.0)
        if self.lost:
            raise PeerLost("interrupted")


class Scripted:
    """NCCL and its communicator in one: an operation ends when the test says so."""

    communicator_bytes = 0

    def __init__(self) -> None:
        self.begun: list[tuple[torch.Tensor, ScriptedWork]] = []
        self.closed = threading.Event()
        self.may_close = threading.Event()
        self.may_close.set()

    def facts(self) -> bytes:
        return b""

    def open(self, rank: int, facts: bytes, given_up: object, deadline: float) -> Scripted:
        return self

    def send(self, staging: torch.Tensor) -> ScriptedWork:
        self.begun.append((staging, ScriptedWork()))
        return self.begun[-1][1]

    recv = send

    def interrupt(self) -> None:
        for _, work in self.begun:
            work.lost = True
            work.over.set()

    def close(self) -> None:
        assert self.may_close.wait(10.0)
        self.closed.set()

    def end(self, number: int, value: int = 0) -> None:
        """One has arrived, or was sent."""
        if value:
            self.begun[number][0].fill_(value)
        self.begun[number][1].over.set()


class Side:
    """A pool, a scripted backend and what a pair over them says."""

    def __init__(self) -> None:
        self.pool = torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        self.backend = Scripted()
        self.said: list[PairMessage] = []
        region = PoolRegion(self.pool.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu")
        self.budget = Budget(1 << 20)
        self.terms = Terms(StagedPool(region), self.backend, self.budget, SLICE_BYTES, 10.0, 10.0)
        self.ended = threading.Event()

    def on_end(self, pair: Pair) -> None:
        self.ended.set()

    def reader(self) -> ReaderPair:
        return ReaderPair(b"p", SLICE_BYTES, self.terms, self.said.append, self.on_end)

    def begun(self, count: int) -> None:
        wait_until(lambda: len(self.backend.begun) >= count)
        time.sleep(0.02)  # for one too many
        assert len(self.backend.begun) == count


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    yield side
    assert side.ended.wait(10.0)
    assert side.backend.closed.is_set()
    assert side.budget.used_bytes == 0


def transfer(*blocks: int) -> Transfer:
    return Transfer(blocks, blocks, Share(0, 0, BLOCK_BYTES))


def ask(*blocks: int) -> Ask:
    return Ask(b"p", list(blocks), 0, BLOCK_BYTES)


def test_a_reader_receives_ahead_across_transfers_and_in_order(side: Side) -> None:
    pair = side.reader()
    long, short = transfer(0, 1, 2, 3), transfer(9)
    assert pair.read(long)
    assert pair.read(short)
    pair.thread.start()
    side.begun(STAGES)
    side.backend.end(1, 2)
    side.backend.end(2, 3)
    time.sleep(0.02)
    assert not side.pool.any()
    side.backend.end(0, 1)
    wait_until(lambda: long.done and short.done)
    assert side.pool[:4, 0].tolist() == [1, 1, 2, 2]
    assert side.pool[9].tolist() == [3] * BLOCK_BYTES
    # A stage is used again only when its bytes are in the pool.
    more = transfer(*range(10, 10 + 2 * STAGES + 2))
    assert pair.read(more)
    side.begun(2 * STAGES)
    side.backend.end(STAGES, 4)
    side.begun(2 * STAGES + 1)
    assert side.pool[10:12, 0].tolist() == [4, 4]
    assert side.backend.begun[2 * STAGES][0].data_ptr() == side.backend.begun[STAGES][0].data_ptr()
    pair.abort(PeerLost("enough"))


def test_nothing_lands_after_an_abort(side: Side) -> None:
    pair = side.reader()
    one, other = transfer(0, 1, 2, 3), transfer(4)
    pair.read(one)
    pair.read(other)
    pair.thread.start()
    side.begun(STAGES)
    side.backend.end(0, 1)
    wait_until(lambda: side.pool[:2].all())
    side.backend.begun[1][0].fill_(7)  # it is being written
    pair.abort(PeerLost("lost"))
    assert isinstance(one.error, PeerLost)
    assert isinstance(other.error, PeerLost)
    assert side.ended.wait(10.0)
    assert side.pool[2:].sum() == 0
    assert not pair.read(transfer(5))
    assert isinstance(side.said[-1], Part)


def test_what_an_idle_source_has_not_heard_of_is_left_for_another_pair(side: Side) -> None:
    pair = side.reader()
    begun, waiting = transfer(0), transfer(1)
    pair.read(begun)
    pair.thread.start()
    side.begun(1)
    pair.read(waiting)
    assert pair.end(PeerLost("idle")) == [begun, waiting]
    assert not pair.read(transfer(2))
    assert side.ended.wait(10.0)
    assert not any(each.done or each.error for each in (begun, waiting))
    assert not side.pool.any()
    assert pair.end(PeerLost("again")) == []


def test_who_has_lost_its_source_waits_a_moment_for_the_reason(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_pairs, "HEAR_S", 10.0)
    pair = side.reader()
    lost = transfer(0)
    pair.read(lost)
    pair.thread.start()
    side.begun(1)
    side.backend.interrupt()  # the connection has broken
    assert side.backend.closed.wait(10.0)
    assert lost.error is None
    assert pair.end(PeerLost("idle")) == [lost]
    assert side.ended.wait(10.0)
    assert lost.error is None


def test_a_transfer_whose_copies_are_held_up_is_over_when_its_communicator_is_closed(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "settled", lambda lane: False)
    pair = side.reader()
    held_up = transfer(0)
    pair.read(held_up)
    pair.thread.start()
    side.begun(1)
    side.backend.end(0, 1)
    wait_until(lambda: side.pool[0].all())
    side.backend.may_close.clear()
    pair.abort(PeerLost("lost"))
    assert held_up.error is None
    assert not held_up.done
    side.backend.may_close.set()
    wait_until(lambda: held_up.error is not None)
    assert side.backend.closed.is_set()


def test_a_source_gathers_into_a_stage_only_when_it_has_been_sent(side: Side) -> None:
    side.pool[:] = torch.arange(BLOCKS, dtype=torch.uint8)[:, None]
    pair = SourcePair(Meet(b"p", SLICE_BYTES, b""), side.terms, side.said.append, side.on_end)
    pair.thread.start()
    for blocks in ([5, 6, 7], [8], [20, 21, 22, 23]):
        pair.serve(ask(*blocks))
    side.begun(STAGES)
    assert [stage[0].item() for stage, _ in side.backend.begun] == [5, 6, 8]
    assert [len(stage) for stage, _ in side.backend.begun] == [8, 16, 8]
    side.backend.end(0)
    side.begun(STAGES + 1)
    assert side.backend.begun[STAGES][0].tolist() == [20] * 8 + [21] * 8
    assert [stage[0].item() for stage, _ in side.backend.begun[1:STAGES]] == [6, 8]
    side.backend.end(1)
    side.backend.end(2)
    side.begun(STAGES + 2)
    pair.abort(PeerLost("enough"))
