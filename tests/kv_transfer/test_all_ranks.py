"""Peers and reads in parts, in random orders of events."""

from __future__ import annotations

import random
from itertools import count

import pytest

from kvrelay.kv_transfer.backend import (
    BackendJob,
    DropPeer,
    Joined,
    ReadEnded,
    Source,
)
from kvrelay.kv_transfer.backends import Backends
from kvrelay.kv_transfer.connector import PeerKey, PoolRegion, Read
from kvrelay.kv_transfer.ranks import Do, News, ToRank
from kvrelay.wire.errors import KvrelayError, PeerLost, TransferError

PEER, FAR = PeerKey("h", 1, "g"), PeerKey("h", 1, "g/1")
ERROR, LOST = TransferError("broke"), PeerLost("gone")
READ = Read(7, PEER, (1, 2), (3, 4))


class Ranks(Backends):
    """Ranks to which nothing is sent: `jobs` is what was asked of each. Parts: (rank, source)."""

    def __init__(self, *parts: tuple[int, PeerKey]) -> None:
        self.jobs: list[tuple[int, BackendJob]] = []
        self._ways, self._reads, self._numbers = {}, {}, count(1)
        region = PoolRegion(0, 8, 16, "cpu")
        self.sources = [(rank, Source("e", key.generation, region, b"")) for rank, key in parts]
        self.add_peer(PEER, "a", self.sources)

    def __len__(self) -> int:
        return len(self._ways) + len(self._reads)

    def _do(self, rank: int, message: ToRank) -> None:
        assert isinstance(message, Do)
        self.jobs.append((rank, message.job))

    def joined(
        self, rank: int, source: PeerKey, error: KvrelayError | None = None, attempt: int = 1
    ) -> object:
        return self.heard(rank, News("a", Joined(source, attempt, error)))

    def ended(self, rank: int, event: ReadEnded) -> object:
        return self.heard(rank, News("a", event))


def test_a_peer_that_one_part_cannot_join_is_told_of_once_and_dropped_everywhere() -> None:
    it = Ranks((0, PEER), (1, PEER), (1, FAR))
    assert it.joined(1, PEER) is None
    it.jobs.clear()
    assert it.joined(1, FAR, ERROR) == Joined(PEER, 1, ERROR)
    assert it.jobs == [(0, DropPeer(PEER)), (1, DropPeer(PEER)), (1, DropPeer(FAR))]
    it.add_peer(PEER, "b", it.sources)
    assert it.joined(0, PEER, ERROR) is None  # the first attempt's
    assert it.joined(0, PEER, attempt=2) is it.joined(1, FAR, attempt=2) is None
    assert it.joined(1, PEER, attempt=2) == Joined(PEER, 2)


@pytest.mark.parametrize("seed", range(30))
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
            outcome = it.ended(rank, ReadEnded(source, 7))
        else:
            outcome = it.ended(rank, ReadEnded(source, 7, error, bool(scripts[part])))
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
