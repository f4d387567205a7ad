"""A simulated cluster: what becomes of each request on its way through router and nodes.

The way is that of router/request/: a prefill leg, a decode leg beside it from the ticket on, or a
decode node that does it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrelay.planner.cluster import Clock, Cluster
from kvrelay.planner.router import SimulatedAdmission
from kvrelay.planner.seat import Leg
from kvrelay.planner.setting import Result, Setting, Stream
from kvrelay.router.nodes.node import Lease
from kvrelay.router.placement import Placement
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery

__all__ = ["World", "simulate"]


def simulate(streams: Sequence[Stream], setting: Setting) -> Result:
    """Serve these requests, in the order of their arrival, until all have ended."""
    return World(streams, setting).run()


class World:
    """A cluster and the requests on their way; `run` serves them until all have ended."""

    def __init__(self, streams: Sequence[Stream], setting: Setting) -> None:
        self._streams = streams
        self._result = Result(setting, streams)
        self.clock = Clock()
        self.cluster = Cluster(setting, self.clock, self)
        self._router = self.cluster.router
        self._left = len(streams)
        self._placed: dict[Stream, PlacementLeases] = {}
        later = self.clock.later
        self._door = SimulatedAdmission(self._router, later, self._begin, self._refuse)

    def run(self) -> Result:
        for number, stream in enumerate(self._streams):
            stream.number = number
            if not stream.waits:
                self._comes(stream, stream.at)
        self.clock.run(lambda: self._left > 0, self.cluster.tell_news)
        return self._result

    def _comes(self, stream: Stream, at: float) -> None:
        stream.at = at
        self.clock.later(at, lambda now: self._arrives(stream, now))

    def _arrives(self, stream: Stream, now: float) -> None:
        if stream.prompt + stream.output > self._result.setting.card.kv_tokens:
            self._refuse(stream)
        else:
            self._door.arrive(stream, now)

    def _refuse(self, stream: Stream) -> None:
        stream.refused = True
        self._forget(stream)

    def _begin(
        self, stream: Stream, wanted: PlacementQuery, placement: Placement, now: float
    ) -> None:
        placed = replace(self._router.placer.take(wanted, placement), at=now)
        self._placed[stream] = placed
        if placed.prefill is None:
            stream.local = True
            self._submit(placed.decode, stream, Leg.WHOLE, now)
        else:
            self._submit(placed.prefill, stream, Leg.PREFILL, now)

    def _submit(self, lease: Lease, stream: Stream, leg: Leg, now: float) -> None:
        at, told = self._router.number(lease.node), self._router.told(self._placed[stream])
        self.cluster.nodes[at].submit(stream, leg, now, told)
        self.cluster.report(at, lease, now, taken=True)

    def begins(self, stream: Stream, now: float) -> None:
        """Note that a prefill leg begins; its decode leg waits beside it."""
        placed = self._placed[stream]
        self._tells(placed.prefill, now)
        if stream.output > 1:
            self._submit(placed.decode, stream, Leg.DECODE, now)

    def _tells(self, lease: Lease | None, now: float) -> None:
        assert lease is not None
        at = self._router.number(lease.node)
        self.cluster.report(at, lease, now)
        self.cluster.tell_kv(at, now)

    def computed(self, stream: Stream, now: float, last_chunk: int) -> None:
        placed = self._placed[stream]
        stream.first = now
        stream.rungs = self._router.rungs(stream, placed)
        if placed.prefill is None:
            placed.decode.answered()
            self._tells(placed.decode, now)
            return
        self._tells(placed.prefill, now)
        self._router.pool.give_back(placed.prefill)
        if stream.output > 1:
            node = self.cluster.nodes[self._router.number(placed.decode.node)]
            node.computed(stream, last_chunk, now)
        else:
            self._release(stream, now)
            self._done(stream, now)

    def fetched(self, stream: Stream, now: float) -> None:
        self.cluster.tell_kv(self._router.number(self._placed[stream].decode.node), now)
        self._release(stream, now)

    def _release(self, stream: Stream, now: float) -> None:
        lease = self._placed[stream].prefill
        assert lease is not None
        at = self._router.number(lease.node)
        self.cluster.nodes[at].release(stream, now)
        self.cluster.emptied(at, now)

    def ended(self, stream: Stream, now: float) -> None:
        self._tells(self._placed[stream].decode, now)
        self._done(stream, now)

    def _done(self, stream: Stream, now: float) -> None:
        stream.last = now
        placed = self._placed.pop(stream)
        self._router.placer.give_back(placed)
        self._router.answered(stream)
        self._forget(stream)
        self.cluster.emptied(self._router.number(placed.decode.node), now)

    def _forget(self, stream: Stream) -> None:
        self._left -= 1
        self._door.ended(stream, self.clock.now)
        for each in stream.then:
            each.waits -= 1
            if not each.waits:
                self._comes(each, self.clock.now + each.gap)

    def gap(self, ms: float, times: int) -> None:
        self._result.add_gap(ms, times)
