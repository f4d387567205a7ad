"""A world in which time is a number: its events, its clocks, and its links between nodes.

`SimulatedControl` stands where real nodes have kv_transfer/control.py and its sockets. Knows
nothing of leases, fetches or requests. Rules of the network are TCP's: what one side says arrives
in order or not at all; a connection that breaks loses what is under way, and only the side that
dialled is told.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrelay.kv_transfer.connector import PeerKey
from kvrelay.kv_transfer.control import ENDED
from kvrelay.kv_transfer.messages import Message, decode, encode

if TYPE_CHECKING:
    from simulated_node import SimulatedNode

# The way of a message, in seconds. Most are quick; some lie in a buffer for a while.
QUICK_S, SLOW_S = 0.002, 0.08


class Violation(AssertionError):
    """A promise of the hand-over was broken."""


class World:
    """Events in order of time, and everything that is in the world."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count(1)
        self.nodes: list[SimulatedNode] = []
        self.listening: dict[tuple[str, int], SimulatedNode] = {}
        self.links: list[Link] = []
        self.here: SimulatedNode | None = None  # whose code runs now
        self.calm_at = 0.0  # no fault has an effect after this
        self.trace: list[str] | None = None
        self.dark: dict[
            frozenset[str], float
        ] = {}  # pairs of hosts that do not hear each other, and until when
        # the backend reads what a stopped or dead node had (direct), or needs it (NIXL)
        self.blind_reads = False
        self.shares_words = (
            False  # readers see which leases are held (kv_transfer/host_memory.py), or ask
        )
        self.checksums = 0.0  # the share of blocks that are compared with their source
        self.slowest_read_s = 0.1

    def say(self, text: str) -> None:
        """One line of the story, if anybody wants it."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f} {text}")

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay_s, next(self.count), event))

    def disturbed_until(self, at: float) -> None:
        self.calm_at = max(self.calm_at, at)

    def way_s(self) -> float:
        """How long the next message is under way."""
        return self.rng.random() * (QUICK_S if self.rng.random() < 0.9 else SLOW_S)

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """All that happens before `until` is true. Raises Violation if that takes longer than
        `limit_s`.
        """
        end = self.now + limit_s
        while not until():
            if not self.events or self.events[0][0] > end:
                raise Violation(f"not over {limit_s:g} s later")
            self.now, _, event = heapq.heappop(self.events)
            event()

    def dark_until(self, one: SimulatedNode, other: SimulatedNode) -> float:
        return self.dark.get(frozenset((one.host, other.host)), 0.0)


class FakeTime:
    """`time` of the modules under test. Every node has a clock of its own, which is nobody else's
    business.
    """

    world: World

    def monotonic(self) -> float:
        here = self.world.here
        return self.world.now + (here.offset_s if here else 0.0)

    def time(self) -> float:
        return 1.7e9 + self.world.now


CLOCK = FakeTime()


@dataclass(eq=False, slots=True)
class Link:
    """One connection that a reader has dialled."""

    world: World
    reader: SimulatedNode
    peer: PeerKey
    source: SimulatedNode
    name: bytes
    up: bool = True
    hung_up: bool = False
    last: list[float] = field(
        default_factory=lambda: [0.0, 0.0]
    )  # arrival of the newest message, each direction

    def carry(self, direction: int, deliver: Callable[[], None]) -> None:
        """In order, when the way is free."""
        world = self.world
        self.last[direction] = max(self.last[direction], world.now + world.way_s())
        world.after(self.last[direction] - world.now, partial(self._arrive, direction, deliver))

    def _arrive(self, direction: int, deliver: Callable[[], None]) -> None:
        until = self.world.dark_until(self.reader, self.source)
        if until > self.world.now:
            # TCP sends again when it is over; whatever comes behind this message waits for it.
            self.last[direction] = max(self.last[direction], until)
            self.world.after(until - self.world.now, partial(self._arrive, direction, deliver))
        elif self.up:
            deliver()

    def to_source(self, frame: bytes) -> None:
        self.carry(
            0, lambda: self.source.control.receive(lambda: self.source.control.serve(self, frame))
        )

    def to_reader(self, frame: bytes) -> None:
        self.carry(
            1, lambda: self.reader.control.receive(lambda: self.reader.control.listen(self, frame))
        )

    def end(self) -> None:
        """The source is gone: all it has said arrives, and then the end of it."""
        self.carry(1, lambda: self.reader.control.receive(lambda: self.reader.control.lost(self)))

    def reset(self) -> None:
        """Cut: what is under way is lost. The reader is told, the source never finds out."""
        self.up = False
        self.world.after(
            self.world.way_s(),
            lambda: self.reader.control.receive(lambda: self.reader.control.lost(self)),
        )


class SimulatedControl:
    """`ControlThread` over links. Its thread is a queue of jobs that a stopped node does not get
    to.
    """

    def __init__(self, listener: Any, host: str, port: int, secret: str) -> None:
        node = CLOCK.world.here
        assert node is not None
        self._listener, self._node, self._world = listener, node, CLOCK.world
        self.address = (host, port)
        self._links: dict[PeerKey, Link] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._turn_at = float("inf")
        node.control = self

    def start(self) -> None:
        self._world.listening[self.address] = self._node
        self._turn_in(0.0)

    def dial(self, peer: PeerKey, hello: Message) -> None:
        self._post(partial(self._dial, peer, encode(hello)))

    def send(self, peer: PeerKey, message: Message) -> None:
        self._world.say(f"{self._node.name} says {message}")
        self._post(partial(self._say, peer, encode(message)))

    def send_to_reader(self, sender: bytes, message: Message) -> None:
        self._post(partial(self._tell, sender, encode(message)))

    def hang_up(self, peer: PeerKey) -> None:
        self._post(partial(self._hang_up, peer))

    def probe(self, peer: PeerKey) -> None:
        def answer() -> None:
            unheard = (
                self._world.dark.get(frozenset((self._node.host, peer.host)), 0.0) > self._world.now
            )
            if (peer.host, peer.port) not in self._world.listening and not unheard:
                self.receive(lambda: self._listener.on_process_gone(peer))

        self._world.after(self._world.way_s(), answer)

    def close(self, timeout_s: float) -> None:
        """Nodes of this world are killed, never closed."""

    # What the links deliver.

    def receive(self, job: Callable[[], None]) -> None:
        """Into the buffers of this node, which fill whether it runs or not."""
        if self._node.alive:
            self._post(job)

    def serve(self, link: Link, frame: bytes) -> None:
        answer = self._listener.answer(link.name, decode(frame))
        if answer is not None and not link.hung_up:
            self._world.say(f"{self._node.name} answers {link.reader.name} {answer}")
            link.to_reader(encode(answer))

    def listen(self, link: Link, frame: bytes) -> None:
        if self._links.get(link.peer) is link:
            self._listener.on_message(link.peer, decode(frame))

    def lost(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            self._world.say(f"{self._node.name} has lost its connection to {link.source.name}")
            self._hang_up(link.peer)
            self._listener.on_disconnect(link.peer, ENDED)

    # The thread.

    def turn(self) -> None:
        """What `ControlThread` does in one turn, but in any order that its sockets allow."""
        if not self._node.running or self._world.now < self._turn_at:
            return
        self._turn_at = float("inf")
        with self._node.at_work():
            beat_first = self._world.rng.random() < 0.5
            wait_s = self._listener.tick(CLOCK.monotonic()) if beat_first else 0.0
            for _ in range(len(self._jobs)):
                self._jobs.popleft()()
            if not beat_first:
                wait_s = self._listener.tick(CLOCK.monotonic())
        self._turn_in(0.0005 if self._jobs else max(0.001, wait_s))

    def wake(self) -> None:
        """The node goes on."""
        self._turn_at = float("inf")
        self._turn_in(0.0)

    def _post(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._turn_in(0.0005)

    def _turn_in(self, delay_s: float) -> None:
        at = self._world.now + max(delay_s, 0.0)
        if at < self._turn_at:
            self._turn_at = at
            self._world.after(at - self._world.now, self.turn)

    def _dial(self, peer: PeerKey, hello: bytes) -> None:
        there = self._world.listening.get((peer.host, peer.port))
        if there is None:
            self._listener.on_disconnect(peer, ENDED)
            return
        link = Link(self._world, self._node, peer, there, b"link%d" % next(self._world.count))
        self._world.links.append(link)
        self._links[peer] = link
        link.to_source(hello)

    def _say(self, peer: PeerKey, frame: bytes) -> None:
        link = self._links.get(peer)
        if link is not None and link.up:
            link.to_source(frame)

    def _tell(self, sender: bytes, frame: bytes) -> None:
        for link in self._world.links:
            if link.name == sender and link.up and not link.hung_up:
                link.to_reader(frame)

    def _hang_up(self, peer: PeerKey) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.hung_up = True
