"""The thread of a backend: when it takes a READ for over. Its turns are taken here, by a clock
of the test's own.
"""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest

import kvrelay.kv_transfer.backend
from kvrelay.kv_transfer.backend import (
    BROKEN_S,
    AddPeer,
    BackendThread,
    DropPeer,
    Open,
    PeerGone,
    ReadEnded,
    Source,
)
from kvrelay.kv_transfer.connector import PeerKey, PoolRegion, Read
from kvrelay.wire.errors import PeerLost, TransferError

PEER = PeerKey("127.0.0.1", 5600, "g")
BROKE, LOST = TransferError("a part of it broke"), PeerLost("disconnected")


def ended(number: int = 1) -> ReadEnded:
    return ReadEnded(PEER, number)


def failed(error: TransferError, number: int = 1, *, in_flight: bool) -> ReadEnded:
    return ReadEnded(PEER, number, error, in_flight)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Scene:
    """A READ that was posted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend, self.clock = Mock(helps_readers=False), Clock()
        self.backend.poll.side_effect = [False] * 99
        self.told: list[object] = []
        monkeypatch.setattr(kvrelay.kv_transfer.backend, "time", self.clock)
        self.thread = BackendThread(self.backend, self.told.append, self.told.append)
        self.thread.do(Open())
        self.turn()
        self.thread.do(AddPeer(PEER, Source("e", "g", PoolRegion(0, 8, 1, "cpu"), b""), 1))
        self.turn()
        self.thread.do(Read(1, PEER, (1, 2), (3, 4)))
        self.turn()

    def turn(
        self, later_s: float = 0.0, outcome: bool | TransferError | None = None
    ) -> list[object]:
        """What the engine is told in the next turn, so much later."""
        self.clock.now += later_s
        if outcome is not None:
            self.backend.poll.side_effect = [outcome] * 99
        self.thread._turn()
        told = list(self.told)
        self.told.clear()
        return told


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def polls_no_more(scene: Scene) -> bool:
    before = scene.backend.poll.call_count
    scene.turn()
    return bool(scene.backend.poll.call_count == before)


def test_it_is_seen_at_work_with_every_turn_and_silent_while_its_backend_hangs(
    scene: Scene,
) -> None:
    scene.clock.now += 30.0  # in one call of its backend
    assert scene.thread.silent_s() == 30.0
    scene.turn()
    assert scene.thread.silent_s() == 0.0


def test_a_read_that_is_done_or_disconnected_is_over(scene: Scene) -> None:
    assert scene.turn() == []
    assert scene.turn(0.1, True) == [ended()]
    assert polls_no_more(scene)
    scene.backend.poll.side_effect = [False] * 99
    scene.thread.do(Read(2, PEER, (1,), (3,)))
    assert scene.turn() == []
    assert scene.turn(0.1, LOST) == [failed(LOST, 2, in_flight=False)]
    assert polls_no_more(scene)


def test_a_broken_read_is_told_of_once_and_waited_for_long(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    assert scene.turn(0.1, BROKE) == [failed(BROKE, in_flight=True)]
    assert scene.turn(BROKEN_S / 2) == []
    assert scene.turn(BROKEN_S / 2 - 0.1) == []
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert scene.turn(0.2) == [failed(BROKE, in_flight=False)]
    assert (
        "a READ of 2 blocks from 127.0.0.1:5600 broke 1000 s ago: its blocks leave quarantine"
        in caplog.text
    )
    assert polls_no_more(scene)


@pytest.mark.parametrize(("end", "told"), [(True, ended()), (LOST, failed(LOST, in_flight=False))])
def test_a_broken_read_is_over_as_soon_as_the_backend_says_so(
    scene: Scene, end: bool | TransferError, told: object
) -> None:
    scene.turn(0.1, BROKE)
    assert scene.turn(0.1, end) == [told]
    assert polls_no_more(scene)


def test_only_the_backend_says_what_the_end_of_a_process_ends(scene: Scene) -> None:
    scene.turn(0.1, BROKE)
    scene.thread.do(PeerGone(PEER))
    assert scene.turn() == []
    scene.backend.peer_gone.assert_called_once_with("g")
    assert not polls_no_more(scene)


@pytest.mark.parametrize("block", [-1, 8, 1 << 40])
def test_blocks_outside_the_peers_pool_are_refused(scene: Scene, block: int) -> None:
    scene.thread.do(Read(2, PEER, (0, block), (1, 2)))
    (failed,) = scene.turn()
    assert isinstance(failed, ReadEnded)
    assert failed.error is not None
    assert "reach outside a pool of 8 blocks" in failed.error.message
    assert not failed.in_flight


def test_a_peer_that_was_dropped_is_not_read(scene: Scene) -> None:
    for _ in range(2):
        scene.thread.do(DropPeer(PEER))
        scene.turn()
    scene.thread.do(Read(2, PEER, (0,), (1,)))
    (failed,) = scene.turn()
    assert isinstance(failed, ReadEnded)
    assert "not there any more" in str(failed.error)
