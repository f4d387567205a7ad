"""A simulated cluster: what becomes of each request on its way through routers and nodes, on one virtual clock.

The way is that of router/walk/: a prefill leg, a decode leg beside it as soon as the ticket is there, or a decode node
that does it all; a place on a decode node when there is room; what a lost node had is done elsewhere, with the tokens
that the client has. Owns no node and no choice. Left out: cuts of connections while nodes live, retries of what a node
refuses, several choices of one answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.cluster import Clock, Cluster
from simulator.door import Door
from simulator.routers import Omniscient
from simulator.seat import Leg
from simulator.setting import OMNISCIENT, Result, Setting
from simulator.stream import Stream
from simulator.watch import Watch
from wire.config import Role

__all__ = ["simulate"]

ROOM_DEADLINE_MS = 30_000.0
"""As router/walk/binding.py waits for room."""
_AGAIN_MS = 100.0
"""So long an answer of which a part is there waits to look again for a node."""
_DEADLINE_MS = 600_000.0
"""Of a request that finds no node to go on: a router's request_deadline_s, if nobody has changed it."""


def simulate(streams: Sequence[Stream], setting: Setting) -> Result:
    """Serve these requests, in the order of their arrival, until all have ended."""
    return _World(streams, setting).run()


@dataclass(eq=False, slots=True)
class _Walk:
    """A request under way. Nodes are numbers."""

    router: int
    prefill: int | None = None
    """That has its KV, or computes it."""
    decode: int | None = None
    ticket: bool = False
    """Its prefill leg has begun."""
    computed: bool = False
    exposed_ms: float = 0.0
    timing: dict[str, float] = field(default_factory=dict)
    whole: bool = False
    """The node that decodes it has computed its prompt."""
    source: int | None = None
    """The prefill node that it was fetched from."""
    looks: int = 0
    """How often there was no node to decode it."""
    had: int = 0
    """Tokens that were there when it was last begun."""


class _World:
    """Hears of all legs."""

    def __init__(self, streams: Sequence[Stream], setting: Setting) -> None:
        self._setting, self._streams = setting, streams
        self._result = Result(setting, streams)
        self._clock = Clock()
        self._cluster = Cluster(setting, self._clock, self, self._lost)
        self._nodes, self._routers = self._cluster.nodes, self._cluster.routers
        self._left = len(streams)
        self._walks: dict[Stream, _Walk] = {}
        self._rng = random.Random(f"clients {setting.seed}")
        self._omniscient: Omniscient | None = None
        if setting.policy == OMNISCIENT:
            self._omniscient = Omniscient(self._nodes, f"omniscient {setting.seed}")
        self._doors: list[Door] = []
        if setting.max_queue:
            self._doors = [Door(router.pool, setting, self._clock.later) for router in self._routers]
        self._watch: Watch | None = None
        if setting.balancing is not None:
            self._watch = Watch(setting, self._cluster, self._clock, self._result)

    def run(self) -> Result:
        """Once."""
        for number, stream in enumerate(self._streams):
            stream.number = number
            self._clock.later(stream.at, lambda now, stream=stream: self._arrives(stream, now))  # type: ignore[misc]
        self._clock.run(lambda: self._left > 0, self._cluster.tell_news)
        self._result.events = self._clock.events
        self._result.preemptions = sum(node.preemptions for node in self._nodes)
        for router in self._routers:
            self._result.local.update(router.local)
        return self._result

    # --- a request's way -----------------------------------------------------------------------------------------

    def _arrives(self, stream: Stream, now: float) -> None:
        router = self._rng.randrange(len(self._routers)) if self._routers else -1
        self._walks[stream] = _Walk(router)
        if self._watch is not None:
            self._watch.arrived(stream)
        if stream.prompt + stream.output > min(node.speeds.kv_tokens for node in self._nodes[:1] + self._nodes[-1:]):
            self._refuse(stream)
        elif self._doors:
            self._doors[router].arrive(stream, now, self._start, self._refuse)
        else:
            self._start(stream, now)

    def _refuse(self, stream: Stream) -> None:
        stream.refused = True
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        walk = self._walks.pop(stream)
        self._left -= 1
        if self._doors:
            self._doors[walk.router].ended(stream, self._clock.now)

    def _give_up(self, stream: Stream, walk: _Walk, now: float) -> None:
        """It has found no node for too long, and its client has a part of the answer."""
        if walk.prefill is not None:
            self._broken(stream, walk, Role.PREFILL)
            self._nodes[walk.prefill].drop(stream, now)
        stream.failed = True
        self._forget(stream)

    def _start(self, stream: Stream, now: float) -> None:
        walk = self._walks[stream]
        walk.prefill = walk.decode = walk.source = None
        walk.ticket = walk.computed = walk.whole = False
        walk.looks += 1
        walk.had, walk.timing = stream.done, {}
        if not self._takes(Role.DECODE, walk):
            if not stream.done:
                self._refuse(stream)
            elif now - stream.at > _DEADLINE_MS:
                self._give_up(stream, walk, now)
            else:
                self._clock.later(now + _AGAIN_MS, lambda then: self._start(stream, then))
            return
        walk.prefill = self._source(stream, walk, now)
        if walk.prefill is None:
            self._place(stream, now)
        else:
            self._nodes[walk.prefill].submit(stream, Leg.PREFILL, now, stream.done)
            self._placed_at_door(stream, walk)

    def _takes(self, role: Role, walk: _Walk) -> bool:
        if self._omniscient is not None:
            return bool(self._cluster.taking(role))
        return bool(self._routers[walk.router].pool.up(role))

    def _source(self, stream: Stream, walk: _Walk, now: float) -> int | None:
        if self._omniscient is None:
            return self._routers[walk.router].source(stream)
        among = self._cluster.taking(Role.PREFILL)
        return self._omniscient.choose_prefill(stream, among, now) if among else None

    def _place(self, stream: Stream, now: float) -> None:
        """Find a decode node, with room."""
        walk = self._walks[stream]
        if self._omniscient is not None:
            among = self._cluster.taking(Role.DECODE)
            if among:
                self._placed(stream, self._omniscient.choose_decode(stream, among, now, whole=walk.prefill is None))
                return
            if now - stream.at > _DEADLINE_MS:
                self._give_up(stream, walk, now)
                return
            walk.looks += 1
            looks = walk.looks
            self._clock.later(now + _AGAIN_MS, lambda then: self._look_again(stream, walk, looks, then))
            return
        router = self._routers[walk.router]
        router.place(stream, walk.prefill, lambda at: self._placed(stream, at))
        if router.waits(stream):
            self._clock.later(now + ROOM_DEADLINE_MS, lambda then: self._late(stream, walk, then))

    def _look_again(self, stream: Stream, walk: _Walk, looks: int, now: float) -> None:
        if walk.looks == looks and self._walks.get(stream) is walk:
            self._place(stream, now)

    def _late(self, stream: Stream, walk: _Walk, now: float) -> None:
        """It waited for room too long: it is refused if its client has nothing yet, else it goes on waiting."""
        router = self._routers[walk.router]
        if not router.waits(stream) or self._walks.get(stream) is not walk:
            return
        if stream.done and now < stream.at + _DEADLINE_MS:
            self._clock.later(stream.at + _DEADLINE_MS, lambda then: self._late(stream, walk, then))
            return
        router.give_up(stream)
        if stream.done:
            self._give_up(stream, walk, now)
            return
        if walk.prefill is not None:
            router.broken(stream, Role.PREFILL)
            self._nodes[walk.prefill].drop(stream, now)
        self._refuse(stream)

    def _placed(self, stream: Stream, at: int) -> None:
        walk, now = self._walks[stream], self._clock.now
        walk.decode = at
        node = self._nodes[at]
        if walk.prefill is None:
            walk.whole = True
            stream.local = True
            node.submit(stream, Leg.WHOLE, now, stream.done)
        elif walk.computed:
            node.submit(stream, Leg.DECODE, now, stream.done)
            node.computed(stream, stream.prompt + stream.done, now)
        else:
            node.submit(stream, Leg.DECODE, now, stream.done + 1)
        self._placed_at_door(stream, walk)

    def _placed_at_door(self, stream: Stream, walk: _Walk) -> None:
        if self._doors:
            self._doors[walk.router].placed(stream, decoding=walk.decode is not None)

    # --- what nodes tell (simulator/engine.py) ---------------------------------------------------------------------

    def begins(self, stream: Stream, now: float) -> None:
        """The ticket comes, and the decode leg goes out."""
        walk = self._walks[stream]
        assert walk.prefill is not None
        walk.ticket = True
        if stream.output - stream.done > 1:
            self._place(stream, now)
        if self._routers:
            self._cluster.report(walk.prefill, walk.router, now)
            self._cluster.tell_kv(walk.prefill, now)

    def computed(self, stream: Stream, now: float, waited_ms: float, took_ms: float, last_chunk: int) -> None:
        """A prompt is computed, by a leg of either kind."""
        walk = self._walks[stream]
        if stream.done:  # its client has waited since a node was lost
            self.gap(now - stream.told, 1)
            stream.longest = max(stream.longest, now - stream.told)
        stream.done += 1
        stream.told = now
        if stream.first < 0:
            stream.first = now
            if self._watch is not None:
                self._watch.first_token(stream)
        if walk.whole:
            walk.timing = {"queue": waited_ms, "prefill": took_ms}
            if self._routers:
                assert walk.decode is not None
                self._routers[walk.router].answered(stream)
                self._cluster.tell_kv(walk.decode, now)
            return
        assert walk.prefill is not None
        walk.computed = True
        if self._routers:
            self._routers[walk.router].prefilled(stream, waited_ms, took_ms)
            self._cluster.report(walk.prefill, walk.router, now)
            self._cluster.tell_kv(walk.prefill, now)
        if stream.done >= stream.output:
            self._release(stream, walk, now)
            self._done(stream, now)
        elif walk.decode is not None:
            self._nodes[walk.decode].computed(stream, last_chunk, now)

    def fetched(self, stream: Stream, now: float, exposed_ms: float) -> None:
        """A decode leg has its KV."""
        walk = self._walks[stream]
        assert walk.decode is not None
        walk.exposed_ms = exposed_ms
        if self._routers:
            self._routers[walk.router].answered(stream)
            self._cluster.tell_kv(walk.decode, now)
        self._release(stream, walk, now)

    def _release(self, stream: Stream, walk: _Walk, now: float) -> None:
        assert walk.prefill is not None
        walk.source, walk.prefill = walk.prefill, None
        self._nodes[walk.source].release(stream, now)
        self._cluster.emptied(walk.source, now)

    def ended(self, stream: Stream, now: float, took_ms: float, queued_ms: float) -> None:
        """The last token is there."""
        walk = self._walks[stream]
        assert walk.decode is not None
        if self._routers:
            walk.timing["decode"] = took_ms
            if not walk.whole:
                walk.timing["exposed"] = walk.exposed_ms
            generated = stream.output - walk.had
            self._routers[walk.router].ended(stream, walk.timing, generated, walk.source)
            self._cluster.report(walk.decode, walk.router, now)
            self._cluster.tell_kv(walk.decode, now)
        at = walk.decode
        self._done(stream, now)
        self._cluster.emptied(at, now)

    def _done(self, stream: Stream, now: float) -> None:
        stream.last, stream.done = now, stream.output
        if self._watch is not None:
            self._watch.ended(stream)
        self._forget(stream)

    def gap(self, ms: float, times: int) -> None:
        """Between two tokens."""
        self._result.add_gap(ms, times)

    # --- lost nodes ------------------------------------------------------------------------------------------------

    def _lost(self, legs: list[tuple[Stream, Leg, int]], now: float) -> None:
        for stream, leg, generated in legs:
            walk = self._walks.get(stream)
            if walk is None:
                continue
            stream.moved += 1
            if leg is Leg.PREFILL:
                self._lost_kv(stream, walk, now)
            elif leg is Leg.DECODE:
                self._broken(stream, walk, Role.DECODE)
                walk.decode = None
                self._place(stream, now)
            else:
                if generated > stream.done:
                    stream.done, stream.told = generated, now
                self._broken(stream, walk, Role.DECODE)
                self._start(stream, now)

    def _lost_kv(self, stream: Stream, walk: _Walk, now: float) -> None:
        """Another prefill node takes it if none has begun; else the decode node computes it."""
        self._broken(stream, walk, Role.PREFILL)
        if walk.decode is not None:
            self._broken(stream, walk, Role.DECODE)
            self._nodes[walk.decode].drop(stream, now)
        elif self._routers and self._routers[walk.router].waits(stream):
            self._routers[walk.router].give_up(stream)
        if not walk.ticket:
            self._start(stream, now)
            return
        walk.prefill, walk.decode, walk.computed = None, None, False
        walk.looks += 1
        self._place(stream, now)

    def _broken(self, stream: Stream, walk: _Walk, role: Role) -> None:
        if self._routers:
            self._routers[walk.router].broken(stream, role)
