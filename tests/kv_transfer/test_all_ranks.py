"""Peers and reads in parts, in random orders of events."""

from __future__ import annotations

import random

import pytest

from kvrelay.kv_transfer.backend import (
    AddPeer,
    BackendJob,
    DropPeer,
    Joined,
    ReadEnded,
    Source,
)
from kvrelay.kv_transfer.backends import AllRanksBackend
from kvrelay.kv_transfer.connector import PeerKey, PoolRegion, Read
from kvrelay.wire.errors import KvrelayError, PeerLost, TransferError

PEER, FAR = PeerKey("h", 1, "g"), PeerKey("h", 1, "g/1")
ERROR, LOST = TransferError("broke"), PeerLost("gone")
READ = Read(7, PEER, (1, 2), (3, 4))


class Ranks(AllRanksBackend):
    """What was asked of each rank is in `jobs`. Parts are (rank, its source)."""

    def __init__(self, *parts: tuple[int, PeerKey]) -> None:
        self.jobs: list[tuple[int, BackendJob]] = []
        super().__init__(lambda rank, job: self.jobs.append((rank, job)))
        region = PoolRegion(0, 8, 16, "cpu")
        self.sources = [(rank, Source("e", key.generation, region, b"")) for rank, key in parts]
        self.add_peer(PEER, self.sources)

    def joined(self, rank: int, source: PeerKey, error: KvrelayError | None = None) -> object:
        return self.on_event(rank, Joined(source, error))


def test_a_peer_is_joined_when_all_parts_are() -> None:
    it = Ranks((0, PEER), (1, PEER), (1, FAR))
    assert [type(job) for _, job in it.jobs] == [AddPeer] * 3
    assert it.joined(1, FAR) is None
    assert it.joined(0, PEER) is None
    assert it.joined(1, PEER) == Joined(PEER, None)


def test_a_peer_that_one_part_cannot_join_is_told_of_once_and_dropped_everywhere() -> None:
    it = Ranks((0, PEER), (1, PEER), (1, FAR))
    assert it.joined(1, PEER) is None
    it.jobs.clear()
    assert it.joined(1, FAR, ERROR) == Joined(PEER, ERROR)
    assert it.jobs == [(0, DropPeer(PEER)), (1, DropPeer(PEER)), (1, DropPeer(FAR))]
    assert it.joined(0, PEER, ERROR) is None
    assert len(it) == 0


def test_a_late_answer_to_an_earlier_attempt_is_not_taken_for_one_to_the_next() -> None:
    it = Ranks((0, PEER), (1, PEER))
    it.joined(0, PEER, ERROR)
    it.add_peer(PEER, it.sources)
    assert it.joined(0, PEER) is None
    assert it.joined(1, PEER, ERROR) is None  # the first attempt's
    assert it.joined(1, PEER) == Joined(PEER, None)


def test_each_part_is_told_the_same_blocks_of_its_own_source() -> None:
    it = Ranks((0, PEER), (1, FAR))
    it.jobs.clear()
    it.read(READ)
    assert it.jobs == [(0, READ), (1, Read(7, FAR, (1, 2), (3, 4)))]


@pytest.mark.parametrize("seed", range(100))
def test_a_read_ends_with_its_last_part_and_fails_with_the_first(seed: int) -> None:
    """Each part's events come in order; those of all parts in any order."""
    rng = random.Random(seed)
    parts = [
        (rank, PeerKey("h", 1, f"g/{source}"))
        for rank in range(3)
        for source in range(rng.randrange(1, 3))
    ]
    it = Ranks(*parts)
    it.read(READ)
    scripts = {
        part: [ERROR] * rng.randrange(2) + [rng.choice([None, None, LOST])] for part in parts
    }
    first: KvrelayError | None = None
    while scripts:
        part = rng.choice(list(scripts))
        error, (rank, source) = scripts[part].pop(0), part
        if error is None:
            outcome = it.on_event(rank, ReadEnded(source, 7))
        else:
            outcome = it.on_event(rank, ReadEnded(source, 7, error, bool(scripts[part])))
        if not scripts[part]:
            del scripts[part]
        news, first = first is None and error is not None, first or error
        if not scripts and first is None:
            assert outcome == ReadEnded(PEER, 7)
        elif not scripts or news:
            assert first is not None
            assert outcome == ReadEnded(PEER, 7, first, in_flight=bool(scripts))
        else:
            assert outcome is None
    it.drop_peer(PEER)
    assert len(it) == 0
