"""Peers and reads in parts, in random orders of events, against a twin that knows everything."""

from __future__ import annotations

import random

import pytest

from kvrelay.kv_transfer.backend import Joined, ReadEnded, ReadFailed
from kvrelay.kv_transfer.connector import PeerKey, Read
from kvrelay.kv_transfer.rank_backends import Part, PartTable
from kvrelay.wire.errors import KvrelayError, PeerLost, TransferError

PEER = PeerKey("h", 1, "g")
OWN, OTHER, FAR = Part(0, PEER), Part(1, PEER), Part(1, PeerKey("h", 1, "g/1"))
ERROR, LOST = TransferError("broke"), PeerLost("gone")


def table(*parts: Part) -> PartTable:
    it = PartTable()
    it.add_peer(PEER, parts)
    return it


def joined(it: PartTable, part: Part, error: KvrelayError | None) -> object:
    return it.on_event(part.rank, Joined(part.source, error))


def read(number: int = 7) -> Read:
    return Read(number, PEER, (1, 2), (3, 4))


def test_a_peer_is_joined_when_all_parts_are() -> None:
    it = table(OWN, OTHER, FAR)
    assert joined(it, FAR, None) is None
    assert joined(it, OWN, None) is None
    assert joined(it, OTHER, None) == Joined(PEER, None)


def test_a_peer_that_one_part_cannot_join_is_told_of_once_and_others_answer_in_vain() -> None:
    it = table(OWN, OTHER, FAR)
    assert joined(it, OTHER, None) is None
    assert joined(it, FAR, ERROR) == Joined(PEER, ERROR)
    assert it.drop_peer(PEER) == (OWN, OTHER, FAR)
    assert joined(it, OWN, ERROR) is None
    assert len(it) == 0


def test_a_late_answer_to_an_earlier_attempt_is_not_taken_for_one_to_the_next() -> None:
    it = table(OWN, OTHER)
    joined(it, OWN, ERROR)
    it.drop_peer(PEER)
    it.add_peer(PEER, [OWN, OTHER])
    assert joined(it, OWN, None) is None
    assert joined(it, OTHER, ERROR) is None  # the first attempt's
    assert joined(it, OTHER, None) == Joined(PEER, None)


def test_each_part_is_told_the_same_blocks_of_its_own_source() -> None:
    it = table(OWN, FAR)
    (own, its), (far, theirs) = it.read(read())
    assert (own, its, far) == (OWN, read(), FAR)
    assert theirs == Read(7, FAR.source, (1, 2), (3, 4))


@pytest.mark.parametrize("seed", range(300))
def test_random_orders_give_what_the_twin_says(seed: int) -> None:
    """Of each part's script the events come in order; over all parts in any order."""
    rng = random.Random(seed)
    parts = [
        Part(rank, PeerKey("h", 1, f"g/{source}"))
        for rank in range(3)
        for source in range(rng.randrange(1, 3))
    ]
    it = table(*parts)
    for part in parts:
        joined(it, part, None)
    scripts: list[tuple[int, Part, list[KvrelayError | str]]] = []
    for number in (1, 2):
        it.read(read(number))
        for part in parts:
            broken: list[KvrelayError | str] = [ERROR] * rng.randrange(2)
            scripts.append((number, part, [*broken, rng.choice(["ended", "ended", LOST])]))
    first: dict[int, KvrelayError] = {}
    running = {number: set(parts) for number in (1, 2)}
    while scripts:
        number, part, script = scripts[index := rng.randrange(len(scripts))]
        event = script.pop(0)
        if not script:
            scripts.pop(index)
            running[number].discard(part)
        if event == "ended":
            outcome = it.on_event(part.rank, ReadEnded(part.source, number))
        else:
            assert isinstance(event, KvrelayError)
            outcome = it.on_event(part.rank, ReadFailed(part.source, number, event, bool(script)))
        news = event != "ended" and number not in first
        if event != "ended":
            assert isinstance(event, KvrelayError)
            first.setdefault(number, event)
        if not running[number] and number in first:
            assert outcome == ReadFailed(PEER, number, first[number], in_flight=False)
        elif not running[number]:
            assert outcome == ReadEnded(PEER, number)
        elif news:
            assert outcome == ReadFailed(PEER, number, first[number], in_flight=True)
        else:
            assert outcome is None
    it.drop_peer(PEER)
    assert len(it) == 0
