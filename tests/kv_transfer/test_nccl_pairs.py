"""A pair's end under transfers; the KV that they move is in test_nccl.py."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from engine_node import wait_until
from fake_nccl import FakeCommunicator, FakeNccl

from kvrelay.kv_transfer import nccl_pairs
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.nccl_library import SENDS
from kvrelay.kv_transfer.nccl_pairs import Budget, Meet, PairMessage, ReaderPair, Terms, Transfer
from kvrelay.kv_transfer.shares import Share
from kvrelay.kv_transfer.staging import Lane, StagedPool
from kvrelay.wire.errors import PeerLost

BLOCKS, BLOCK_BYTES = 4, 8


class Reading:
    """A reader's end, which waits for the first of two transfers, and the test's communicator."""

    def __init__(self) -> None:
        self.pool = torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        region = PoolRegion(self.pool.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu")
        said, self.ended = list[PairMessage](), threading.Event()
        terms = Terms(StagedPool(region), FakeNccl(10.0), Budget(1 << 20), BLOCK_BYTES, 10.0, 10.0)
        self.pair = ReaderPair(b"p", BLOCK_BYTES, terms, said.append, lambda _: self.ended.set())
        share = Share(0, 0, BLOCK_BYTES)
        self.transfers = [Transfer([block], [block], share) for block in (0, 1)]
        for transfer in self.transfers:
            assert self.pair.read(transfer)
        self.pair.thread.start()
        wait_until(lambda: said)
        assert isinstance(said[0], Meet)
        self.source = FakeNccl(10.0).open(SENDS, said[0].facts, lambda: False, math.inf)
        wait_until(lambda: self.pair._communicator)


@pytest.mark.parametrize("broken", [False, True])
def test_what_an_idle_source_has_not_heard_of_is_left_for_another_pair(
    monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    monkeypatch.setattr(nccl_pairs, "HEAR_S", 10.0)
    it = Reading()
    if broken:  # the source's farewell is on its way
        assert it.pair._communicator is not None
        it.pair._communicator.interrupt()
        wait_until(lambda: it.pair._communicator is None)
    assert it.pair.end(PeerLost("idle")) == it.transfers
    assert not it.pair.read(it.transfers[0])
    assert it.ended.wait(10.0)
    assert not any(each.done or each.error for each in it.transfers)
    assert it.pair.end(PeerLost("again")) == []


def test_a_transfer_whose_copies_are_held_up_is_over_when_its_communicator_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_close = threading.Event()
    monkeypatch.setattr(Lane, "settled", lambda _: False)
    monkeypatch.setattr(FakeCommunicator, "close", lambda _: may_close.wait(10.0))
    it = Reading()
    it.source.send(torch.full((BLOCK_BYTES,), 7, dtype=torch.uint8))()
    wait_until(lambda: it.pool[0].all())
    it.pair.abort(PeerLost("lost"))
    assert not any(each.done or each.error for each in it.transfers)
    may_close.set()
    wait_until(lambda: all(each.error for each in it.transfers))
    assert it.ended.wait(10.0)


def test_nothing_lands_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCommunicator, "interrupt", lambda _: None)
    it = Reading()
    it.pair.abort(PeerLost("lost"))
    assert all(each.error for each in it.transfers)
    it.source.send(torch.full((BLOCK_BYTES,), 7, dtype=torch.uint8))()
    assert it.ended.wait(10.0)
    assert not it.pool.any()
