"""A simulated cluster: what becomes of each request on its way through router and nodes.

The way is that of router/request/: a prefill leg, a decode leg beside it from the ticket on, or a
decode node that does it all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.planner.cluster import Clock, Cluster
from kvrelay.planner.router import DEADLINE_MS, SimulatedAdmission
from kvrelay.planner.seat import Leg, PlacementHints
from kvrelay.planner.setting import Result, Setting, Stream
from kvrelay.router.nodes.node import Lease
from kvrelay.router.placement import Placement
from kvrelay.router.request.placer import PlacementQuery
from kvrelay.wire.ladder import Found, places_of

__all__ = ["World", "simulate"]


_AGAIN_MS, _MOST_LOOKS = 50.0, 600


def simulate(streams: Sequence[Stream], setting: Setting) -> Result:
    """Serve these requests, in the order of their arrival, until all have ended."""
    return World(streams, setting).run()


@dataclass(eq=False, slots=True)
class _Walk:
    prefill: Lease | None = None
    lease: Lease | None = None
    """The request's place on a decode node."""
    told: PlacementHints = field(default_factory=PlacementHints)
    source: int | None = None
    """The prefill node that has its KV, or computes it."""
    decode: int | None = None
    computed: bool = False
    looks: int = 0
    placed: float = 0.0
    holders: Sequence[str] = ()
    """The nodes that were to have the prompt's KV, when it was placed."""


class World:
    """A cluster and the requests on their way; `run` serves them until all have ended."""

    def __init__(self, streams: Sequence[Stream], setting: Setting) -> None:
        self._streams = streams
        self._result = Result(setting, streams)
        self.clock = Clock()
        self.cluster = Cluster(setting, self.clock, self, self._lost)
        self._nodes, self._router = self.cluster.nodes, self.cluster.router
        self._left = len(streams)
        self._walks: dict[Stream, _Walk] = {}
        later = self.clock.later
        self._door = SimulatedAdmission(self._router, later, self._begin, self._refuse)

    def run(self) -> Result:
        for number, stream in enumerate(self._streams):
            stream.number = number
            if not stream.waits:
                self._comes(stream, stream.at)
        self.clock.run(lambda: self._left > 0, self.cluster.tell_news)
        return self._result

    def _arrives(self, stream: Stream, now: float) -> None:
        self._walks[stream] = _Walk()
        if stream.prompt + stream.output > self._result.setting.card.kv_tokens:
            self._refuse(stream)
        else:
            self._door.arrive(stream, now)

    def _refuse(self, stream: Stream) -> None:
        stream.refused = True
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        walk = self._walks.pop(stream)
        self._left -= 1
        self._give_back(walk.prefill, walk.lease)
        self._router.ended(stream)
        self._door.ended(stream, self.clock.now)
        for each in stream.then:
            each.waits -= 1
            if not each.waits:
                self._comes(each, self.clock.now + each.gap)

    def _comes(self, stream: Stream, at: float) -> None:
        stream.at = at
        self.clock.later(at, lambda now: self._arrives(stream, now))

    def _give_back(self, *leases: Lease | None) -> None:
        for lease in leases:
            if lease is not None:
                self._router.pool.give_back(lease)

    def _begin(
        self, stream: Stream, wanted: PlacementQuery, placement: Placement, now: float
    ) -> None:
        walk = self._walks[stream]
        router = self._router
        walk.told = router.told(wanted, placement, stream)
        placed = router.placer.take(wanted, placement)
        walk.placed = now
        named = (placement.prefill, placement.prompt[2])
        walk.holders = places_of(named)
        walk.lease = placed.decode
        if placed.prefill is None:
            self._decode(stream, walk, now)
            return
        walk.prefill, walk.source, walk.computed = (
            placed.prefill,
            router.number(placed.prefill.node),
            False,
        )
        self._nodes[walk.source].submit(stream, Leg.PREFILL, now, stream.done, walk.told)
        self.cluster.report(walk.source, walk.prefill, now, taken=True)

    def _decode(self, stream: Stream, walk: _Walk, now: float) -> None:
        lease = walk.lease
        assert lease is not None
        if not _stands(lease):
            self._give_back(lease)
            self._place(stream, now)
            return
        at = self._router.number(lease.node)
        node, done, leg = self._nodes[at], stream.done, Leg.DECODE
        if walk.source is None:
            leg = Leg.WHOLE
        elif not walk.computed:
            done += 1
        node.submit(stream, leg, now, done, walk.told)
        walk.decode = at
        if walk.source is None:
            stream.local = True
        elif walk.computed:
            node.computed(stream, stream.prompt + stream.done, now)
        self.cluster.report(at, lease, now, taken=True)

    def _place(self, stream: Stream, now: float) -> None:
        walk, begun = self._walks[stream], stream.done > 0
        walk.looks += 1
        router, looks = self._router, walk.looks
        wanted = dataclasses.replace(router.wanted(stream, walk.source), ignores_room=begun)
        found = router.find(wanted)
        if isinstance(found, Placement):
            self._begin(stream, wanted, found, now)
        elif now >= stream.at + DEADLINE_MS or (
            not begun and (found is None or looks > _MOST_LOOKS)
        ):
            self._give_up(stream, walk, now)
        else:
            self.clock.later(
                now + _AGAIN_MS, lambda then: self._place_again(stream, walk, looks, then)
            )

    def _place_again(self, stream: Stream, walk: _Walk, looks: int, now: float) -> None:
        if walk.looks == looks and self._walks.get(stream) is walk:
            self._place(stream, now)

    def _give_up(self, stream: Stream, walk: _Walk, now: float) -> None:
        if walk.source is not None:
            self._drop(walk.source, stream, now)
        stream.failed = stream.done > 0
        stream.refused = not stream.failed
        self._forget(stream)

    def _drop(self, at: int, stream: Stream, now: float) -> None:
        self._nodes[at].drop(stream, now)
        self.cluster.emptied(at, now)

    def begins(self, stream: Stream, now: float) -> None:
        walk = self._walks[stream]
        self._router.learn(stream)
        self._tells(walk.source, walk.prefill, now)
        if stream.output - stream.done > 1 and _stands(
            walk.lease
        ):  # else when its prompt is computed
            self._decode(stream, walk, now)

    def _tells(self, at: int | None, lease: Lease | None, now: float) -> None:
        assert at is not None
        assert lease is not None
        self.cluster.report(at, lease, now)
        self.cluster.tell_kv(at, now)

    def computed(self, stream: Stream, now: float, last_chunk: int) -> None:
        walk = self._walks[stream]
        if stream.done:  # its client has waited since a node was lost
            self.gap(now - stream.told, 1)
        stream.done += 1
        stream.told = now
        if stream.first < 0:
            stream.first = now
            stream.rungs = self._rungs(stream, walk)
        if walk.source is None:
            assert walk.lease is not None
            walk.lease.answered()
            self._router.learn(stream)
            self._tells(walk.decode, walk.lease, now)
            return
        walk.computed = True
        self._tells(walk.source, walk.prefill, now)
        self._give_back(walk.prefill)
        if stream.done >= stream.output:
            self._release(stream, walk, now)
            self._done(stream, now)
        elif walk.decode is None:
            self._decode(stream, walk, now)
        else:
            self._nodes[walk.decode].computed(stream, last_chunk, now)

    def _rungs(self, stream: Stream, walk: _Walk) -> dict[str, int]:
        setting, read = self._result.setting, stream.read
        if not setting.prefixes:
            return {}
        found = Found(stream.cached - sum(read.values()), **read)
        history = self.cluster.history
        of = stream.blocks, setting.block_size, walk.placed, walk.holders, [*history.held]
        return history.ladder(stream.prompt, found, *of)

    def fetched(self, stream: Stream, now: float) -> None:
        walk = self._walks[stream]
        assert walk.decode is not None
        self.cluster.tell_kv(walk.decode, now)
        self._release(stream, walk, now)

    def _release(self, stream: Stream, walk: _Walk, now: float) -> None:
        at, walk.source = walk.source, None
        assert at is not None
        self._nodes[at].release(stream, now)
        self.cluster.emptied(at, now)

    def ended(self, stream: Stream, now: float) -> None:
        walk = self._walks[stream]
        assert walk.decode is not None
        self._tells(walk.decode, walk.lease, now)
        self._done(stream, now)
        self.cluster.emptied(walk.decode, now)

    def _done(self, stream: Stream, now: float) -> None:
        stream.last, stream.done = now, stream.output
        self._forget(stream)

    def gap(self, ms: float, times: int) -> None:
        self._result.add_gap(ms, times)

    def _lost(self, legs: list[tuple[Stream, Leg, int]], now: float) -> None:
        for stream, leg, generated in legs:
            walk = self._walks.get(stream)
            if walk is None:
                continue
            stream.moved += 1
            if leg is Leg.PREFILL:
                if walk.decode is not None:
                    self._drop(walk.decode, stream, now)
                walk.source = None
                self._give_back(walk.prefill)
            elif leg is Leg.WHOLE and generated > stream.done:
                stream.done, stream.told = generated, now
            walk.decode = None
            self._give_back(walk.lease)
            if leg is not Leg.DECODE or walk.computed:  # else when its prompt is
                self._place(stream, now)


def _stands(lease: Lease | None) -> bool:
    return lease is not None and lease.node.up and lease in lease.node.leases
