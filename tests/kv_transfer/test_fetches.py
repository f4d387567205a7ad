"""Fetches of the reader side, driven at random against a world that knows the truth, and by hand through each path."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.connector import Fetched, FetchFailed, Settled
from kv_transfer.fetches import End, FetchLimits, FetchTable, PeerKey, Read
from kv_transfer.leases import LeaseId
from wire.errors import PeerLost, TransferError

PEER = PeerKey("127.0.0.1", 5600, "g1")
LIMITS = FetchLimits(lease_s=5.0, deadline_s=10.0, floor_bytes_s=100.0, block_bytes=100)


def watched(now: float = 0.0) -> tuple[FetchTable, LeaseId]:
    """A table with request r watched, its peer ready and its lease renewed at `now`."""
    table, lease = FetchTable(LIMITS), LeaseId("source-r", 1)
    table.watch("r", PEER, lease)
    table.peer_ready(PEER, now)
    table.renewed(PEER, [lease], [], now, now)
    return table, lease


def reading(now: float = 0.0) -> tuple[FetchTable, LeaseId, Read]:
    """The same, with its READ of two blocks posted."""
    table, lease = watched(now)
    table.fetch("r", [1, 2], [3, 4], now)
    (read,) = table.commands
    assert isinstance(read, Read)
    table.commands.clear()
    return table, lease, read


def drained(table: FetchTable) -> list[object]:
    table.check()
    events: list[object] = list(table.events)
    table.events.clear()
    return events


def test_confirmed_read_is_fetched() -> None:
    table, lease, read = reading()
    assert read == Read(read.read_id, PEER, (1, 2), (3, 4))
    table.read_ended(read.read_id)
    assert drained(table) == []
    assert table.commands == [End(PEER, lease, read.read_id)]
    table.confirmed(PEER, read.read_id, held=True, now=0.5)
    assert drained(table) == [Fetched("r", 200, 0.5)]
    assert table.next_deadline() is None


def test_read_that_the_source_does_not_confirm_is_never_fetched() -> None:
    table, _, read = reading()
    table.read_ended(read.read_id)
    table.confirmed(PEER, read.read_id, held=False, now=0.1)
    failed, settled = drained(table)
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith("LeaseLost: 127.0.0.1:5600 no longer holds")
    assert settled == Settled("r")


def test_read_waits_until_a_renewal_young_enough_is_acknowledged() -> None:
    table, lease = watched(now=0.0)
    table.fetch("r", [1], [2], now=4.6)  # 4.5 s is the lease minus its margin
    assert table.commands == []
    table.renewed(PEER, [lease], [], sent_at=0.05, now=4.7)
    assert table.commands == []
    table.renewed(PEER, [lease], [], sent_at=4.65, now=4.8)
    assert [type(command) for command in table.commands] == [Read]


def test_fetch_waits_for_its_peer() -> None:
    table, lease = FetchTable(LIMITS), LeaseId("r", 1)
    table.watch("r", PEER, lease)
    table.fetch("r", [1], [2], 0.0)
    table.renewed(PEER, [lease], [], 0.0, 0.0)
    assert table.commands == []
    table.peer_ready(PEER, 0.1)
    assert [type(command) for command in table.commands] == [Read]


def test_deadline_is_its_constant_plus_size_at_floor_speed_and_late_bytes_stay_quarantined() -> None:
    table, lease, read = reading()
    assert table.next_deadline() == 12.0  # 10 s + 200 bytes at 100 bytes/s
    table.tick(11.9)
    assert drained(table) == []
    table.tick(12.0)
    (failed,) = drained(table)
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith("TransferTimeout: fetch of 2 blocks from 127.0.0.1:5600 took longer than 12.00 s")
    assert table.commands == [End(PEER, lease, 0)]
    table.tick(100.0)
    assert drained(table) == []
    assert table.reading(PEER)
    table.read_ended(read.read_id)
    assert drained(table) == [Settled("r")]
    assert not table.reading(PEER)


def test_broken_read_settles_only_when_nothing_can_land_any_more() -> None:
    table, _, read = reading()
    table.read_failed(read.read_id, TransferError("x"), in_flight=True)
    assert drained(table) == [FetchFailed("r", "TransferError: x")]
    table.read_failed(read.read_id, PeerLost("y"), in_flight=False)
    assert drained(table) == [Settled("r")]


def test_lost_peer_fails_its_fetches_and_their_reads_end_by_themselves() -> None:
    table, _, read = reading()
    table.watch("other", PeerKey("127.0.0.1", 5601, "g2"), LeaseId("other", 1))
    table.peer_lost(PEER, PeerLost("gone"))
    assert drained(table) == [FetchFailed("r", "PeerLost: gone")]
    assert table.commands == []  # nobody to tell
    table.read_failed(read.read_id, PeerLost("z"), in_flight=False)
    assert drained(table) == [Settled("r")]


def test_lease_lost_while_queueing_fails_the_later_fetch_at_once() -> None:
    table, lease = watched()
    table.renewed(PEER, [], [lease], 1.0, 1.0)
    assert drained(table) == []
    assert table.leases(PEER) == []
    table.fetch("r", [1], [2], 2.0)
    assert [type(event) for event in drained(table)] == [FetchFailed, Settled]
    assert table.commands == []


def test_renewal_answered_behind_our_end_does_not_fail_a_confirming_fetch() -> None:
    table, lease, read = reading()
    table.read_ended(read.read_id)
    table.renewed(PEER, [], [lease], 0.1, 0.1)
    assert drained(table) == []
    table.confirmed(PEER, read.read_id, held=True, now=0.2)
    assert [type(event) for event in drained(table)] == [Fetched]


def test_empty_fetch_releases_and_is_fetched_at_once() -> None:
    table, lease = watched()
    table.fetch("r", [], [], 1.0)
    assert table.commands == [End(PEER, lease, 0)]
    assert drained(table) == [Fetched("r", 0, 0.0)]


def test_cancel_of_a_watched_request_only_releases() -> None:
    table, lease = watched()
    table.cancel("r")
    table.cancel("r")
    assert table.commands == [End(PEER, lease, 0)]
    assert drained(table) == []


def test_cancel_of_a_read_settles_when_the_bytes_are_in() -> None:
    table, lease, read = reading()
    table.cancel("r")
    table.cancel("r")
    assert table.commands == [End(PEER, lease, 0)]
    assert drained(table) == []
    table.read_ended(read.read_id)
    assert drained(table) == [Settled("r")]


@pytest.mark.parametrize("held", [True, False])
def test_cancel_takes_back_what_the_step_loop_has_not_seen(held: bool) -> None:
    table, _, read = reading()
    table.read_ended(read.read_id)
    table.confirmed(PEER, read.read_id, held=held, now=0.1)
    table.cancel("r")
    assert drained(table) == [Settled("r")]


def test_answer_meant_for_another_request_of_the_same_lease_confirms_nothing() -> None:
    table, _, read = reading()
    table.read_ended(read.read_id)
    table.confirmed(PEER, 0, held=True, now=0.1)
    table.confirmed(PEER, read.read_id + 1, held=True, now=0.1)
    assert drained(table) == []


def test_misuse_is_refused() -> None:
    table, lease, _ = reading()
    with pytest.raises(ValueError, match="'r' is already reading"):
        table.watch("r", PEER, lease)
    with pytest.raises(ValueError, match="'r' is reading"):
        table.fetch("r", [1], [1], 0.0)
    with pytest.raises(ValueError, match="'s' is not watched"):
        table.fetch("s", [1], [1], 0.0)
    table.watch("s", PEER, lease)
    with pytest.raises(ValueError, match="2 remote blocks for 1 local"):
        table.fetch("s", [1, 2], [1], 0.0)


@dataclass
class World:
    """The truth about one request, kept by brute force beside the table."""

    lease: LeaseId
    held: bool = True  # at the source
    asked: bool = False
    cancelled: bool = False
    in_flight: int | None = None
    proof: bool | None = None  # what the source said to the End behind the last byte
    seen: Counter[type] = field(default_factory=Counter)


class Play:
    """A reader's table between a step loop, a data plane and a source that do what they like, in any order."""

    def __init__(self) -> None:
        self.table = FetchTable(LIMITS)
        self.now = 0.0
        self.gone = False
        self.epoch = 0
        self.worlds: dict[str, World] = {}
        self.acknowledged: dict[LeaseId, float] = {}
        self.ends: list[End] = []  # on their way to the source
        self.answers: list[tuple[int, bool]] = []  # on their way back

    def enabled(self) -> list[tuple[float, partial[None]]]:
        """Everything that may happen next, with its weight: the long way to a Fetched must be gone often enough."""
        steps = [(1.0, partial(self.drain)), (1.0, partial(self.wait, 0.3)), (0.05, partial(self.wait, 5.0))]
        for name in "abc":
            world = self.worlds.get(name)
            if world is None:
                steps += [] if self.gone else [(1.0, partial(self.watch, name))]
                continue
            steps += [(0.1, partial(self.cancel, name)), (0.1, partial(self.source_ends, world))]
            steps += [] if world.asked else [(1.0, partial(self.fetch, name))]
            if world.in_flight is not None:
                steps += [(1.0, partial(self.read_done, world))]
                steps += [(0.1, partial(self.read_dies, world)), (0.1, partial(self.read_breaks, world))]
        if not self.gone:
            steps += [(1.0, partial(self.renew)), (0.5, partial(self.ready)), (0.01, partial(self.lose_peer))]
            steps += [(1.0, partial(self.end_arrives))] if self.ends else []
            steps += [(1.0, partial(self.answer_arrives))] if self.answers else []
        return steps

    def watch(self, name: str) -> None:
        self.epoch += 1
        self.worlds[name] = World(LeaseId(name, self.epoch))
        self.table.watch(name, PEER, self.worlds[name].lease)

    def fetch(self, name: str) -> None:
        world = self.worlds[name]
        world.asked = True
        self.table.fetch(name, [world.lease.epoch], [0], self.now)

    def cancel(self, name: str) -> None:
        world = self.worlds[name]
        self.table.cancel(name)
        world.cancelled = world.cancelled or not world.seen[FetchFailed]
        if not world.asked:
            del self.worlds[name]

    def source_ends(self, world: World) -> None:
        world.held = False

    def read_done(self, world: World) -> None:
        read_id, world.in_flight = world.in_flight, None
        assert read_id is not None
        self.table.read_ended(read_id)

    def read_dies(self, world: World) -> None:
        read_id, world.in_flight = world.in_flight, None
        assert read_id is not None
        self.table.read_failed(read_id, PeerLost("dead"), in_flight=False)

    def read_breaks(self, world: World) -> None:
        assert world.in_flight is not None
        self.table.read_failed(world.in_flight, TransferError("broken"), in_flight=True)

    def renew(self) -> None:
        leases = self.table.leases(PEER)
        held = {world.lease for world in self.worlds.values() if world.held}
        kept = [lease for lease in leases if lease in held]
        self.acknowledged |= dict.fromkeys(kept, self.now)
        self.table.renewed(PEER, kept, [lease for lease in leases if lease not in held], self.now, self.now)

    def ready(self) -> None:
        self.table.peer_ready(PEER, self.now)

    def lose_peer(self) -> None:
        self.gone = True
        self.table.peer_lost(PEER, PeerLost("gone"))

    def end_arrives(self) -> None:
        """At the source, which answers; all bytes that an End with a token speaks of are in by now."""
        end = self.ends.pop(0)
        held = False
        for world in self.worlds.values():
            if world.lease == end.lease:
                held, world.held = world.held, False
                world.proof = held if end.token else world.proof
        self.answers.append((end.token, held))

    def answer_arrives(self) -> None:
        token, held = self.answers.pop(0)
        self.table.confirmed(PEER, token, held=held, now=self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.tick(self.now)

    def carry_out(self) -> None:
        """The commands."""
        self.table.check()
        for command in self.table.commands:
            if isinstance(command, End):
                self.ends.append(command)
                continue
            (world,) = [w for w in self.worlds.values() if (w.lease.epoch,) == command.remote_blocks]
            assert world.asked
            assert not world.cancelled
            assert world.in_flight is None
            assert not self.gone
            assert self.now < self.acknowledged[world.lease] + LIMITS.lease_s
            world.in_flight = command.read_id
        self.table.commands.clear()

    def drain(self) -> None:
        """The step loop sees the events, and checks each against the truth."""
        for event in self.table.events:
            world = self.worlds[event.request_id]
            world.seen[type(event)] += 1
            assert world.asked
            if isinstance(event, Fetched):
                assert world.proof is True
                assert not world.cancelled
                assert not world.seen[FetchFailed]
            elif isinstance(event, FetchFailed):
                assert not world.cancelled
                assert world.seen[FetchFailed] == 1
            else:
                assert world.in_flight is None
                assert world.cancelled or world.seen[FetchFailed]
            if isinstance(event, Fetched | Settled):
                del self.worlds[event.request_id]
        self.table.events.clear()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_random_histories_keep_every_promise(seed: int) -> None:
    """Fetched only with proof; one end each; Settled never while bytes may land; nothing is left over at the end."""
    play, random = Play(), Random(seed)
    for _ in range(200):
        weights, steps = zip(*play.enabled(), strict=True)
        random.choices(steps, weights)[0]()
        play.carry_out()
    for world in list(play.worlds.values()):
        if world.in_flight is not None:
            play.read_dies(world)
    play.carry_out()
    play.wait(100.0)
    play.carry_out()
    play.drain()
    assert all(not world.asked for world in play.worlds.values())
    assert play.table.next_deadline() is None
