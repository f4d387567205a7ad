"""Fetches of the reader side, driven at random against a world that knows the truth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv_transfer.checksums import drawn
from kvrelay.kv_transfer.connector import (
    Ask,
    Completion,
    End,
    Fetched,
    FetchFailed,
    LeaseId,
    PeerKey,
    Settled,
    Sum,
    Verify,
)
from kvrelay.kv_transfer.fetch import FetchLimits
from kvrelay.kv_transfer.fetches import FetchTable
from kvrelay.wire.errors import PeerLost, TransferError

PEER = PeerKey("127.0.0.1", 5600, "g1")
BLOCKS = 3  # of each ticket
LIMITS = FetchLimits(lease_s=5.0, deadline_s=10.0, floor_bytes_s=100.0, block_bytes=100)


def content(block: int) -> bytes:
    """The checksum of a block as its source has it."""
    return b"%d" % block


@dataclass
class World:
    """The truth about one request, kept by brute force beside the table."""

    lease: LeaseId
    cached: int  # of the ticket's blocks, those that the reader has already
    ready: int  # announced
    complete: bool
    read: int = 0  # blocks that were read
    reading: int = 0  # and of these, by the last READ
    held: bool = True  # at the source
    asked: bool = False
    cancelled: bool = False
    in_flight: int | None = None
    proof: bool | None = None  # what the source said to the End behind the last byte
    overwritten: set[int] = field(
        default_factory=set
    )  # blocks that were read after the lease was over
    faulty: set[int] = field(default_factory=set)  # blocks that arrived as what they are not
    vouched: set[int] = field(default_factory=set)  # blocks whose checksum the source has sent
    drawn: set[int] = field(default_factory=set)
    seen: Counter[type] = field(default_factory=Counter)


class Play:
    """A reader's table between a step loop, a data plane and a source that do what they like, in
    any order.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.table = FetchTable(LIMITS, share)
        self.share = share
        self.faults = 0.3 if share else 0.0
        self.rng = Random(0)
        self.asks: list[Ask] = []  # on their way to the source
        self.sums: list[Sum] = []  # of ours, that are not computed yet
        self.now = 0.0
        self.gone = False
        self.epoch = 0
        self.worlds: dict[str, World] = {}
        self.acknowledged: dict[LeaseId, float] = {}
        self.ends: list[End] = []  # on their way to the source
        self.answers: list[tuple[int, bool]] = []  # on their way back

    def enabled(self) -> list[tuple[float, partial[None]]]:
        """Everything that may happen next, with its weight: the long way to a Fetched must be gone
        often enough.
        """
        steps = [
            (1.0, partial(self.drain)),
            (1.0, partial(self.wait, 0.3)),
            (0.05, partial(self.wait, 5.0)),
        ]
        for name in "abc":
            world = self.worlds.get(name)
            if world is None:
                steps += [] if self.gone else [(1.0, partial(self.watch, name))]
                continue
            steps += [(0.1, partial(self.cancel, name)), (0.1, partial(self.source_ends, world))]
            steps += [] if world.asked else [(1.0, partial(self.fetch, name))]
            steps += [] if world.complete or self.gone else [(1.0, partial(self.grow, world))]
            if world.in_flight is not None:
                steps += [(1.0, partial(self.read_done, world))]
                steps += [
                    (0.1, partial(self.read_dies, world)),
                    (0.1, partial(self.read_breaks, world)),
                ]
                steps += [(0.1, partial(self.read_refused, world))]
        if not self.gone:
            steps += [
                (1.0, partial(self.renew)),
                (0.5, partial(self.ready)),
                (0.01, partial(self.lose_peer)),
            ]
            steps += [(1.0, partial(self.end_arrives))] if self.ends else []
            steps += [(1.0, partial(self.answer_arrives))] if self.answers else []
            steps += [(1.0, partial(self.ask_arrives))] if self.asks else []
        steps += [(1.0, partial(self.sum_computed))] if self.sums else []
        return steps

    def watch(self, name: str) -> None:
        self.epoch += 1
        whole = self.epoch % 2 == 0
        world = World(
            LeaseId(name, self.epoch),
            self.epoch % (3 if whole else 4),
            BLOCKS if whole else 0,
            whole,
        )
        self.worlds[name] = world
        self.table.watch(name, PEER, world.lease, None if whole else BLOCKS)

    def fetch(self, name: str) -> None:
        world = self.worlds[name]
        world.asked = True
        blocks = [10 * world.lease.epoch + i for i in range(world.cached, BLOCKS)]
        world.drawn = set(drawn(world.lease, blocks, self.share))
        self.table.fetch(name, blocks, blocks, self.now)

    def grow(self, world: World) -> None:
        world.ready = min(BLOCKS, world.ready + 1)
        world.complete = world.ready == BLOCKS
        completion = Completion([world.lease.epoch]) if world.complete else None
        self.table.grown(PEER, world.lease, world.ready, completion, self.now)

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
        first = 10 * world.lease.epoch + world.cached + world.read - world.reading
        for block in range(first, first + world.reading):
            if not world.held:
                world.overwritten.add(block)
            elif self.rng.random() < self.faults:
                world.faulty.add(block)
        self.table.read_ended(read_id, self.now)

    def read_dies(self, world: World) -> None:
        read_id, world.in_flight = world.in_flight, None
        assert read_id is not None
        self.table.read_failed(read_id, PeerLost("dead"), self.now, in_flight=False)

    def read_refused(self, world: World) -> None:
        read_id, world.in_flight = world.in_flight, None
        assert read_id is not None
        world.read -= world.reading
        self.table.read_failed(read_id, TransferError("refused"), self.now, in_flight=False)

    def read_breaks(self, world: World) -> None:
        assert world.in_flight is not None
        self.table.read_failed(world.in_flight, TransferError("broken"), 0.0, in_flight=True)

    def renew(self) -> None:
        leases = self.table.leases(PEER)
        held = {world.lease for world in self.worlds.values() if world.held}
        kept = [lease for lease in leases if lease in held]
        self.acknowledged |= dict.fromkeys(kept, self.now)
        self.table.renewed(
            PEER, kept, [lease for lease in leases if lease not in held], self.now, self.now
        )

    def ready(self) -> None:
        self.table.peer_ready(PEER, self.now, vouches=True)

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

    def ask_arrives(self) -> None:
        """At the source, which answers what it still holds."""
        ask = self.asks.pop(0)
        for world in self.worlds.values():
            if world.lease == ask.lease and world.held:
                world.vouched.update(ask.remote_blocks)
                told = {block: content(block) for block in ask.remote_blocks}
                self.table.vouched(PEER, ask.lease, told, self.now)

    def sum_computed(self) -> None:
        """Of what has landed here, whoever has written it."""
        command = self.sums.pop(self.rng.randrange(len(self.sums)))
        bad = {
            block for world in self.worlds.values() for block in world.faulty | world.overwritten
        }
        found = [b"else" if block in bad else content(block) for block in command.local_blocks]
        self.table.summed(command.number, found, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.tick(self.now)

    def carry_out(self) -> None:
        """The commands."""
        self.table.check()
        for command in self.table.commands:
            if isinstance(command, End):
                self.ends.append(command)
                asked = [
                    world
                    for world in self.worlds.values()
                    if world.lease == command.lease and command.token
                ]
                assert all(world.vouched >= world.drawn for world in asked)
                continue
            if isinstance(command, Ask):
                self.asks.append(command)
                continue
            if isinstance(command, Sum):
                self.sums.append(command)
                continue
            if isinstance(command, Verify):
                continue  # as if it were lost
            epoch = command.remote_blocks[0] // 10
            (world,) = [w for w in self.worlds.values() if w.lease.epoch == epoch]
            first = world.cached + world.read
            world.reading = len(command.remote_blocks)
            world.read += world.reading
            assert command.remote_blocks == tuple(
                10 * epoch + i for i in range(first, world.cached + world.read)
            )
            assert world.cached + world.read <= world.ready
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
                assert world.complete
                assert not world.overwritten
                assert not world.faulty & world.drawn
                assert world.cached + world.read == BLOCKS
                assert event.completion == (
                    Completion([world.lease.epoch]) if world.lease.epoch % 2 else None
                )
                assert not world.cancelled
                assert not world.seen[FetchFailed]
            elif isinstance(event, FetchFailed):
                assert not world.cancelled
                assert world.seen[FetchFailed] == 1
                kept = {
                    10 * world.lease.epoch + world.cached + place for place in range(event.verified)
                }
                assert not kept & (world.overwritten | (world.faulty & world.drawn))
                if event.cause == "KvCorrupted":
                    assert world.proof is True
                    assert world.faulty & world.drawn
                    assert event.verified == 0
            else:
                assert world.in_flight is None
                assert world.cancelled or world.seen[FetchFailed]
            if isinstance(event, Fetched | Settled):
                del self.worlds[event.request_id]
        self.table.events.clear()


@settings(max_examples=150)
@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.0, 0.5, 1.0]))
def test_random_histories_keep_every_promise(seed: int, share: float) -> None:
    """Fetched only with proof; one end each; Settled never while bytes may land; nothing is left
    over at the end. With checks: nothing is admitted, or kept, that a check was drawn for and that
    is not what its source has.
    """
    play, random = Play(share), Random(seed)
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
    # Left are those whose prompt is still computed: no deadline of ours ends them, their source
    # does.
    assert all(not (world.asked and world.complete) for world in play.worlds.values())
    if not play.gone:
        play.lose_peer()
    play.drain()
    assert all(not world.asked for world in play.worlds.values())
    assert play.table.next_deadline() is None
