"""What a failed fetch may keep: blocks that were read while the source held them, and nothing that
only may be right.

Driven at random against a world that knows which bytes are right, and by hand through each way to a
proof.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv_transfer.connector import (
    Completion,
    End,
    Fetched,
    FetchFailed,
    LeaseId,
    PeerKey,
    Read,
    Settled,
    Verify,
)
from kvrelay.kv_transfer.fetch import FetchLimits
from kvrelay.kv_transfer.fetches import FetchTable
from kvrelay.wire.errors import PeerLost, TransferError

PEER, LEASE = PeerKey("127.0.0.1", 5600, "g1"), LeaseId("source-r", 1)
LIMITS = FetchLimits(lease_s=5.0, deadline_s=10.0, floor_bytes_s=100.0, block_bytes=100)
REMOTE, LOCAL = [7, 8, 9], [1, 2, 3]


def growing() -> FetchTable:
    """A growing ticket of three blocks is asked for; the first is read, from 0.1 s to 0.2 s."""
    table = FetchTable(LIMITS)
    table.watch("r", PEER, LEASE, growing=3)
    table.peer_ready(PEER, 0.0)
    table.renewed(PEER, [LEASE], [], 0.0, 0.0)
    table.fetch("r", REMOTE, LOCAL, 0.0)
    table.grown(PEER, LEASE, 1, None, 0.1)
    table.commands.clear()
    table.read_ended(1, 0.2)
    return table


def lost(table: FetchTable) -> FetchFailed:
    table.check()
    table.peer_lost(PEER, PeerLost("gone"))
    failed = table.events[0]
    assert isinstance(failed, FetchFailed)
    return failed


def test_a_renewal_is_sent_as_soon_as_a_part_is_in() -> None:
    assert growing().commands == [Verify(PEER, LEASE)]


def test_blocks_are_proven_by_a_renewal_sent_after_they_were_in() -> None:
    table = growing()
    table.renewed(PEER, [LEASE], [], sent_at=0.3, now=0.4)
    assert lost(table) == FetchFailed("r", "PeerLost: gone", verified=1)
    assert table.events[1:] == [Settled("r")]


@pytest.mark.parametrize("sent_at", [0.0, 0.15, 0.2])
def test_a_renewal_sent_before_proves_nothing_however_late_its_answer(sent_at: float) -> None:
    table = growing()
    table.renewed(PEER, [LEASE], [], sent_at, now=4.0)
    assert lost(table).verified == 0


def test_a_renewal_proves_what_was_in_when_it_was_sent_and_no_more() -> None:
    table = growing()
    table.grown(PEER, LEASE, 2, None, 0.3)
    table.read_ended(2, 0.5)
    table.renewed(PEER, [LEASE], [], sent_at=0.4, now=0.6)
    assert lost(table).verified == 1


def test_a_lease_that_is_lost_leaves_what_was_proven_before() -> None:
    table = growing()
    table.renewed(PEER, [LEASE], [], sent_at=0.3, now=0.4)
    table.grown(PEER, LEASE, 2, None, 0.5)
    table.read_ended(2, 0.6)
    table.renewed(PEER, [], [LEASE], sent_at=0.7, now=0.8)
    failed = table.events[0]
    assert isinstance(failed, FetchFailed)
    assert (failed.cause, failed.verified) == ("LeaseLost", 1)


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_read_that_breaks_leaves_what_was_proven_before(in_flight: bool) -> None:
    table = growing()
    table.renewed(PEER, [LEASE], [], sent_at=0.3, now=0.4)
    table.grown(PEER, LEASE, 3, Completion([5]), 0.5)
    table.read_failed(2, TransferError("x"), 0.6, in_flight=in_flight)
    if not in_flight:  # tried again once
        table.read_failed(3, TransferError("x"), 0.7, in_flight=False)
    assert table.events[0] == FetchFailed("r", "TransferError: x", verified=1)


def test_all_is_proven_if_only_the_answer_to_the_end_is_missing() -> None:
    table = growing()
    table.grown(PEER, LEASE, 3, None, 0.3)
    table.read_ended(2, 0.4)
    table.renewed(PEER, [LEASE], [], sent_at=0.5, now=0.6)
    table.grown(PEER, LEASE, 3, Completion([5]), 0.7)
    assert lost(table).verified == 3


def test_whole_tickets_are_read_in_one_piece_and_need_no_renewal_between() -> None:
    table = FetchTable(LIMITS)
    table.watch("r", PEER, LEASE)
    table.peer_ready(PEER, 0.0)
    table.renewed(PEER, [LEASE], [], 0.0, 0.0)
    table.fetch("r", REMOTE, LOCAL, 0.0)
    table.commands.clear()
    table.read_ended(1, 0.2)
    assert [type(command) for command in table.commands] == [End]
    assert lost(table).verified == 0


@dataclass
class World:
    """One growing fetch between a step loop, a plane, a source and a network, which do what they
    like in any order.

    Messages keep their order, as on one connection, but take as long as they like, and any number
    may never come.
    """

    random: Random
    blocks: int = 6
    now: float = 0.0
    held: bool = True  # at the source; from there on other KV is written to its blocks
    announced: int = 0
    read_to: int = 0  # blocks whose READ was posted
    in_flight: int | None = None
    dying: bool = False  # told as broken, but its bytes may still land
    memory: list[bool | None] = field(
        default_factory=list
    )  # of our blocks: right, wrong, or not written
    ends: list[tuple[float, int]] = field(default_factory=list)  # of READs
    to_source: list[tuple[float, End | None]] = field(
        default_factory=list
    )  # an End, or a renewal sent at that time
    to_reader: list[tuple[float, bool, End | None]] = field(default_factory=list)
    acknowledged: list[float] = field(
        default_factory=list
    )  # of kept renewals that we heard of: when they were sent
    failed: FetchFailed | None = None
    over: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.memory = [None] * self.blocks
        self.table = FetchTable(LIMITS)
        self.table.watch("r", PEER, LEASE, growing=self.blocks)
        self.table.peer_ready(PEER, 0.0)
        self.table.renewed(PEER, [LEASE], [], 0.0, 0.0)
        self.table.fetch("r", list(range(self.blocks)), list(range(self.blocks)), 0.0)

    def step(self) -> None:
        steps = [
            (4, self.grow),
            (1, self.beat),
            (4, self.arrive),
            (4, self.answer),
            (0.15, self.source_ends),
        ]
        steps += [(0.1, self.lose), (0.1, self.sleep)]
        if self.in_flight is not None:
            steps += [
                (4, self.read_done),
                (0.3, self.read_breaks),
                (0.3, self.read_refused),
                (0.3, self.read_dies),
            ]
        weights, calls = zip(*steps, strict=True)
        self.now += 0.01
        self.random.choices(calls, weights)[0]()
        self.carry_out()

    def grow(self) -> None:
        if self.held:
            self.announced = min(self.blocks, self.announced + self.random.randint(1, 2))
            complete = self.announced == self.blocks and self.random.random() < 0.5
            self.table.grown(
                PEER, LEASE, self.announced, Completion([5]) if complete else None, self.now
            )

    def beat(self) -> None:
        if self.table.leases(PEER):
            self.to_source.append((self.now, None))

    def sleep(self) -> None:
        self.now += 3.0
        self.table.tick(self.now)

    def arrive(self) -> None:
        """At the source: what it holds it says, and an End ends it."""
        if self.to_source:
            sent_at, end = self.to_source.pop(0)
            self.to_reader.append((sent_at, self.held, end))
            self.held = self.held and end is None

    def answer(self) -> None:
        if not self.to_reader:
            return
        sent_at, kept, end = self.to_reader.pop(0)
        if end is not None:
            self.table.confirmed(PEER, end.token, held=kept, now=self.now)
            return
        if kept and self.failed is None:
            self.acknowledged.append(sent_at)
        self.table.renewed(PEER, [LEASE] * kept, [LEASE] * (not kept), sent_at, self.now)

    def source_ends(self) -> None:
        self.held = False

    def lose(self) -> None:
        self.table.peer_lost(PEER, PeerLost("gone"))

    def land(self) -> None:
        """The bytes of the READ in flight: right if nobody has written to them there."""
        begin = self.ends[-1][1] if self.ends else 0
        self.memory[begin : self.read_to] = [self.held] * (self.read_to - begin)

    def read_done(self) -> None:
        assert self.in_flight is not None
        self.land()
        read_id, self.in_flight = self.in_flight, None
        if not self.dying:
            self.ends.append((self.now, self.read_to))
        self.dying = False
        self.table.read_ended(read_id, self.now)

    def read_breaks(self) -> None:
        assert self.in_flight is not None
        self.dying = True
        self.table.read_failed(self.in_flight, TransferError("broken"), self.now, in_flight=True)

    def read_refused(self) -> None:
        self.stop(TransferError("refused"))

    def read_dies(self) -> None:
        self.stop(PeerLost("dead"))

    def stop(self, error: TransferError) -> None:
        assert self.in_flight is not None
        if self.random.random() < 0.5:
            self.land()  # some of it had come
        read_id, self.in_flight, self.dying = self.in_flight, None, False
        self.read_to = self.ends[-1][1] if self.ends else 0
        self.table.read_failed(read_id, error, self.now, in_flight=False)

    def carry_out(self) -> None:
        self.table.check()
        for command in self.table.commands:
            if isinstance(command, Read):
                self.in_flight, self.read_to = command.read_id, command.local_blocks[-1] + 1
            else:
                end = command if isinstance(command, End) else None
                self.now += 0.001
                self.to_source.append((self.now, end))
        self.table.commands.clear()
        for event in self.table.events:
            self.hear(event)
        self.table.events.clear()

    def hear(self, event: Fetched | FetchFailed | Settled) -> None:
        if isinstance(event, Fetched):
            assert self.memory == [True] * self.blocks
        elif isinstance(event, FetchFailed):
            self.failed = event
            provable = [
                landed
                for at, landed in self.ends
                if any(sent_at > at for sent_at in self.acknowledged)
            ]
            assert event.verified == max(provable, default=0)
        self.over = self.over or not isinstance(event, FetchFailed)
        self.outcomes[type(event).__name__] += 1

    def kept(self) -> list[bool | None]:
        """The memory of what a failed fetch lets the request keep."""
        return self.memory[: self.failed.verified] if self.failed is not None else []


def played(seed: int) -> World:
    world = World(Random(seed))
    world.carry_out()
    for _ in range(400):
        if world.over:
            break
        world.step()
        # Not only when it fails: nothing that lands later may touch what was kept.
        assert all(world.kept()), (seed, world.failed, world.memory)
    return world


@settings(max_examples=500)
@given(st.integers(0, 1 << 32))
def test_random_histories_keep_right_bytes_only_and_all_that_can_be_proven(seed: int) -> None:
    played(seed)


def test_the_random_histories_go_everywhere() -> None:
    worlds = [played(seed) for seed in range(300)]
    outcomes = sum((world.outcomes for world in worlds), Counter[str]())
    kept = Counter(world.failed.verified for world in worlds if world.failed is not None)
    assert outcomes["Fetched"] > 30
    assert sum(count for verified, count in kept.items() if 0 < verified < 6) > 30
    wrong = [world for world in worlds if world.failed is not None and False in world.memory]
    assert len(wrong) > 10  # bytes that would have been wrong to keep
