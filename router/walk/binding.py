"""A place on a decode node for each decode leg: at once where there is room, else in turn, with its KV kept meanwhile.

KV that nobody reads is held for a lease. While a leg waits here it has no reader, so the router renews the lease in its
place. Who waits too long is refused, unless its client has the first token already: then it goes where the least is
lacking, the node's own queue the lesser evil. An answer of which a part is there waits also while no node is up, until
the deadline of its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from router.chores import Chores
from router.legs.legs import Legs
from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.node import Lease, Node, NodeKind
from router.nodes.pairing import unlike
from router.nodes.pool import Pool
from router.nodes.room import RoomQueue, Waiter, has_room, with_room
from router.policies.policy import Ask
from router.walk.conditional import Decision, decide
from wire.config import Role
from wire.errors import KvNotLoaded, KvrelayError, NoNode, Overloaded

__all__ = ["ROOM_DEADLINE_S", "Binding", "Wish"]

ROOM_DEADLINE_S = 30.0
"""How long a leg waits for room on the nodes that are up."""
_LOOK_S = 0.1
"""Room is also looked for this often; most of it is told by legs that end."""
_RENEWALS = 4.0
"""Within a lease."""
_RENEW_S = 1.0
"""Where the node does not say how long its leases are."""


class Wish(msgspec.Struct, frozen=True):
    """What a decode leg wants. `peer` has its KV under the id `held`; None: it computes its prompt itself."""

    ask: Ask
    tried: Callable[[], Collection[Node]]
    peer: Node | None
    held: str | None
    is_new: bool
    """Nothing of its answer is there: nodes whose operator wants no prompts computed on them are left alone."""
    begun: Callable[[], bool]
    """Whether the client has a part of the answer."""
    outlasts: Callable[[], bool]
    """Whether a part of the answer is there."""
    until: float
    """Monotonic second at which it has waited long enough."""

    @property
    def patient(self) -> bool:
        """Whether it waits for a node if there is none. Not if one that is up has failed at it."""
        return self.outlasts() and not any(node.up for node in self.tried())


class Binding:
    """One for all walks of a router."""

    def __init__(self, pool: Pool, doors: Doors, legs: Legs, chores: Chores, metrics: Metrics) -> None:
        self._pool, self._doors, self._legs = pool, doors, legs
        self._chores, self._metrics = chores, metrics
        self._queue = RoomQueue()
        metrics.waiting_for_room.read = self.waiting_by_model

    def __len__(self) -> int:
        return len(self._queue)

    def waiting_by_model(self) -> Counter[str]:
        """By model, the legs that wait for room."""
        return Counter(self._pool.base_of(waiter.ask.model) for waiter in self._queue)

    async def place(self, wish: Wish) -> tuple[Lease, bool]:
        """A place until it is given back, and whether the KV can be fetched there; else it is computed.

        Raises NoNode, Overloaded, KvNotLoaded."""
        if not self._queue:
            with _patiently(wish):
                able, fetches = self._able(wish)
                roomy = with_room(wish.ask, able, self._pool.choose)
                if roomy:
                    return self._pool.hold(wish.ask, roomy), fetches
        return await self._waited_for(wish)

    def has_room_beside(self, wish: Wish, node: Node) -> bool:
        """Whether a leg that waits on this node would find room on another one now, and nobody is before it."""
        if self._queue:
            return False
        try:
            able, _ = self._able(wish)
        except KvrelayError:
            return False
        return any(has_room(each, wish.ask) for each in able if each is not node)

    def give_back(self, lease: Lease) -> None:
        """The leg has ended: somebody else may have its place."""
        self._pool.give_back(lease)
        self._turn()

    def computing(self, ask: Ask, tried: Collection[Node] = ()) -> list[Node]:
        """Decode nodes that may compute this prompt. Raises NoNode, Overloaded."""
        nodes = self._doors.takers(ask, tried, time.monotonic(), computes=True)
        able = [node for node in nodes if node.kv is None or node.kv.computes_prompts]
        if not able:
            raise self._pool.no_node(Role.PREFILL, ask.model)
        return able

    def decide(self, ask: Ask, source: Node) -> Decision | None:
        """Whether a prompt that this prefill node would get is better computed on its decode node: None while speeds
        are not known there, or no decode node has said that it would."""
        its = msgspec.structs.replace(ask, role=Role.DECODE)
        try:
            able = [node for node in self.computing(its) if node.kv is not None and node.rates.measured]
        except (NoNode, Overloaded):
            return None
        return decide(ask, source, self._pool.choose(its, able)[0]) if able else None

    def _able(self, wish: Wish) -> tuple[Sequence[Node], bool]:
        """The nodes that may take the leg now, whatever room they have, and whether they fetch its KV."""
        now = time.monotonic()
        if wish.peer is None:
            if wish.is_new:
                return self.computing(wish.ask, wish.tried()), False
            return self._doors.takers(wish.ask, wish.tried(), now, computes=True), False
        nodes = self._doors.takers(wish.ask, wish.tried(), now)
        able = self._doors.paired(nodes, wish.peer, now)
        if able:
            return able, True
        able = [node for node in nodes if node.kv is None or node.kv.computes_prompts]
        if not able:
            why = next(filter(None, (unlike(wish.peer.kv, node.kv) for node in nodes)), "")
            raise KvNotLoaded.because("Incompatible", why)
        return able, False

    async def _waited_for(self, wish: Wish) -> tuple[Lease, bool]:
        waiting = _Waiting(self, wish)
        waiter = Waiter(wish.ask, waiting.candidates, waiting.grant)
        self._queue.add(waiter)
        try:
            self._turn()
            placed = waiting.placed.result() if waiting.placed.done() else await self._waited(wish, waiting)
        finally:
            self._queue.drop(waiter)
        return placed or self._late(wish)

    async def _waited(self, wish: Wish, waiting: _Waiting) -> tuple[Lease, bool] | None:
        """Its place, counted; None if it has taken too long."""
        outcome = "gone"
        try:
            placed = await self._in_turn(wish, waiting)
            outcome = "late" if placed is None else "room"
        except KvrelayError:
            outcome = "failed"
            raise
        finally:
            self._metrics.room_waits.labels(outcome).inc()
            if outcome != "room" and waiting.placed.done() and waiting.placed.exception() is None:
                self._pool.give_back(waiting.placed.result()[0])
        return placed

    async def _in_turn(self, wish: Wish, waiting: _Waiting) -> tuple[Lease, bool] | None:
        """In turn, with the KV kept meanwhile; None if it has taken too long."""
        every_s = _RENEW_S
        if wish.peer is not None and wish.peer.kv is not None and wish.peer.kv.lease_s:
            every_s = wish.peer.kv.lease_s / _RENEWALS
        renew_at = time.monotonic() + every_s
        until = wish.until
        while not waiting.placed.done():
            now = time.monotonic()
            if now >= until:
                if self._ends(wish):
                    return None
                until = now + ROOM_DEADLINE_S  # else all who wait would fall upon the first node that is back
            if wish.peer is not None and wish.held is not None and now >= renew_at:
                renew_at = now + every_s
                self._chores.spawn(self._legs.renew(wish.peer, [wish.held]))
            done, _ = await asyncio.wait((waiting.placed,), timeout=_LOOK_S)
            if not done:
                self._turn()
        return waiting.placed.result()

    def _ends(self, wish: Wish) -> bool:
        """Whether a wait has been long enough: an answer of which a part is there goes on waiting while no node is."""
        if not wish.outlasts():
            return True
        with _patiently(wish):
            return bool(self._able(wish)[0])
        return False

    def _late(self, wish: Wish) -> tuple[Lease, bool]:
        able, fetches = self._able(wish)
        if not wish.begun():
            why = Overloaded(f"no decode node had room for the request within {ROOM_DEADLINE_S:g} s; try again later")
            why.retry_after_s = math.ceil(ROOM_DEADLINE_S)  # as long as those before it have waited
            raise why
        return self._pool.hold(wish.ask, sorted(able, key=lambda node: -node.kv_room)[:1]), fetches

    def _turn(self) -> None:
        if self._queue:
            self._queue.turn(self._pool.up(Role.DECODE, kind=NodeKind.KVRELAY))


@contextlib.contextmanager
def _patiently(wish: Wish) -> Iterator[None]:
    """What is waited for is no error yet: that nodes have rested, or that one is up."""
    try:
        yield
    except Overloaded:
        pass
    except NoNode:
        if not wish.patient:
            raise


class _Waiting:
    """One wish in the queue, until it has a place or can have none."""

    def __init__(self, binding: Binding, wish: Wish) -> None:
        self.placed: asyncio.Future[tuple[Lease, bool]] = asyncio.get_running_loop().create_future()
        self._binding, self._wish = binding, wish
        self._fetches = False

    def candidates(self) -> Sequence[Node]:
        """See Waiter. While all nodes rest there are none; what else is wrong ends the waiting."""
        try:
            with _patiently(self._wish):
                able, self._fetches = self._binding._able(self._wish)
                return () if self.placed.done() else able
        except KvrelayError as why:
            if not self.placed.done():
                self.placed.set_exception(why)
        return ()

    def grant(self, nodes: Sequence[Node]) -> None:
        """See Waiter."""
        self.placed.set_result((self._binding._pool.hold(self._wish.ask, nodes), self._fetches))
