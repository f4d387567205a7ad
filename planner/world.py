"""A simulated cluster: what becomes of each request on its way through router and nodes.

The way is that of router/request/: a prefill leg, a decode leg beside it from the ticket on, or a
decode node that does it all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from kvrelay.planner.engine import Engine
from kvrelay.planner.router import Router
from kvrelay.planner.seat import Leg
from kvrelay.planner.setting import Result, Setting, Stream, Streams
from kvrelay.router.admission.keys import Refusal
from kvrelay.router.admission.queue import AdmissionQueue, QueuedRequest
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.placement import Placement, Refuse, Wait
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvrelayError, NoNode

__all__ = ["Clock", "World", "simulate"]

_POLL_MS = 500.0
_SWITCH_MS = 1_000.0
"""Time of a change of role, from the last request's end to the first poll."""
_KV_EVENT_MS = 5.0
"""Until the router hears of it."""

_DEADLINE_S, _MAX_QUEUE = 600.0, 1_000
"""The defaults of request_deadline_s and max_queue of a router."""
_LOOK_MS = 10.0

Call = Callable[[float], None]


@dataclass(eq=False, slots=True)
class _Queued(QueuedRequest):
    stream: Stream = field(kw_only=True)
    wanted: PlacementQuery = field(kw_only=True)


def simulate(streams: Streams, setting: Setting) -> Result:
    """Serve these requests, in the order of their arrival, until all have ended."""
    return World(streams, setting).run()


class Clock:
    """A clock in milliseconds; calls for one time are made in the order in which they were given."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Call]] = []
        self._scheduled = 0

    def later(self, at: float, call: Call) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (at, self._scheduled, call))

    def run(self, goes_on: Callable[[], bool]) -> None:
        while self._heap and goes_on():
            self.now, _, call = heapq.heappop(self._heap)
            call(self.now)


class World:
    """A cluster and the requests on their way; `run` serves them until all have ended."""

    def __init__(self, streams: Streams, setting: Setting) -> None:
        self._streams = streams
        self._result = Result(setting, streams)
        self.clock = Clock()
        below = setting.below if setting.prefixes else {}
        pulls = setting.pulls and setting.prefixes
        self.router = Router(
            setting,
            [
                Engine(setting.card, setting.block_size, self.clock.later, self, below, pulls=pulls)
                for _ in range(setting.prefill + setting.decode)
            ],
        )
        self._becoming: dict[Node, Role] = {}
        self._left = len(streams)
        self._placed: dict[Stream, PlacementLeases] = {}
        self._queue: AdmissionQueue[_Queued, Placement] = AdmissionQueue(_MAX_QUEUE, self._find)
        self._queued: dict[Stream, _Queued] = {}
        self._looking = False
        nodes = self.router.pool.nodes
        for at, node in enumerate(nodes):
            self.clock.later(at * _POLL_MS / len(nodes), partial(self._poll, node))

    def run(self) -> Result:
        for number, stream in enumerate(self._streams):
            stream.number = number
            if not stream.waits:
                self._comes(stream, stream.at)
        self.clock.run(lambda: self._left > 0)
        return self._result

    def _poll(self, node: Node, now: float) -> None:
        if node not in self._becoming:
            self.router.poll(node, node.role, now)
        self.clock.later(now + _POLL_MS, partial(self._poll, node))

    @property
    def switching(self) -> bool:
        return bool(self._becoming)

    def change_role(self, node: Node, role: Role, now: float) -> None:
        """Have a node take another role as soon as all requests placed on it have ended."""
        self._becoming[node] = role
        self.router.pool.note_role_change(node, role, now / 1e3)
        self._emptied(node, now)

    def _emptied(self, node: Node, now: float) -> None:
        if node in self._becoming and self.router.engine(node).idle and not node.leases:
            self.clock.later(now + _SWITCH_MS, partial(self._switched, node))

    def _switched(self, node: Node, now: float) -> None:
        self.router.poll(node, self._becoming.pop(node), now)

    def _comes(self, stream: Stream, at: float) -> None:
        stream.at = at
        self.clock.later(at, lambda now: self._arrives(stream, now))

    def _arrives(self, stream: Stream, now: float) -> None:
        if stream.prompt + stream.output > self._result.setting.card.kv_tokens:
            self._refuse(stream)
            return
        targets = self.router.targets(stream)
        wanted = self.router.placer.limited(self.router.wanted(stream), targets)
        request = self._queued[stream] = _Queued(
            "",
            now / 1e3,
            tokens=stream.prompt + round(wanted.output),
            ttft_s=targets.ttft_s,
            deadline=now / 1e3 + _DEADLINE_S,
            stream=stream,
            wanted=wanted,
        )
        found: Placement | Wait | Refusal | KvrelayError
        try:
            found = self._queue.arrive(request)
        except NoNode as why:
            found = why
        if not isinstance(found, Wait):
            self._leaves(request, found, now)
        elif not self._looking:
            self._looking = True
            self.clock.later(now + _LOOK_MS, self._look)

    def _find(self, request: _Queued) -> Placement | Wait | Refuse:
        waited_ms = self.clock.now - request.arrived * 1e3
        return self.router.placer.find_after(waited_ms, request.wanted)

    def _look(self, now: float) -> None:
        self._turn(now)
        self._looking = bool(self._queue)
        if self._looking:
            self.clock.later(now + _LOOK_MS, self._look)

    def _turn(self, now: float) -> None:
        for request, found in self._queue.leaving(now / 1e3):
            self._leaves(request, found, now)

    def _leaves(
        self, request: _Queued, found: Placement | Refusal | KvrelayError, now: float
    ) -> None:
        stream = request.stream
        if isinstance(found, Refusal | KvrelayError):
            del self._queued[stream]
            if isinstance(found, Refusal) and found.for_want_of_nodes:
                self.router.placer.note_refused(request.wanted, now / 1e3)
            self._refuse(stream)
            return
        placed = replace(self.router.placer.take(request.wanted, found), at=now)
        self._placed[stream] = placed
        if placed.prefill is None:
            stream.local = True
            self._submit(placed.decode, stream, Leg.WHOLE, now)
        else:
            self._submit(placed.prefill, stream, Leg.PREFILL, now)

    def _refuse(self, stream: Stream) -> None:
        stream.refused = True
        self._forget(stream)

    def _submit(self, lease: Lease, stream: Stream, leg: Leg, now: float) -> None:
        engine = self.router.engine(lease.node)
        engine.submit(stream, leg, now, self.router.told(self._placed[stream]))
        lease.note_load(msgspec.structs.replace(engine.load(now), leg=engine.legs))

    def _tells(self, lease: Lease | None, now: float) -> None:
        assert lease is not None
        lease.note_load(self.router.engine(lease.node).load(now))
        self._tell_kv(lease.node, now)

    def _tell_kv(self, node: Node, now: float) -> None:
        if not self._result.setting.prefixes:
            return
        changed = partial(self.router.pool.prefixes.changed, node.url, at=now)
        for medium, stored, removed in self.router.engine(node).pulls.news():
            if stored or removed:
                call = partial(changed, stored, removed, medium=medium)
                self.clock.later(now + _KV_EVENT_MS, partial(_heard, call))

    def begins(self, stream: Stream, now: float) -> None:
        """Note that a prefill leg begins; its decode leg waits beside it."""
        placed = self._placed[stream]
        self._tells(placed.prefill, now)
        if stream.output > 1:
            self._submit(placed.decode, stream, Leg.DECODE, now)

    def computed(self, stream: Stream, now: float, last_chunk: int) -> None:
        placed = self._placed[stream]
        stream.first = now
        stream.rungs = self.router.rungs(stream, placed)
        if placed.prefill is None:
            placed.decode.answered()
            self._tells(placed.decode, now)
            return
        self._tells(placed.prefill, now)
        self.router.pool.give_back(placed.prefill)
        if stream.output > 1:
            self.router.engine(placed.decode.node).computed(stream, last_chunk, now)
        else:
            self._release(stream, now)
            self._done(stream, now)

    def fetched(self, stream: Stream, now: float) -> None:
        self._tell_kv(self._placed[stream].decode.node, now)
        self._release(stream, now)

    def _release(self, stream: Stream, now: float) -> None:
        lease = self._placed[stream].prefill
        assert lease is not None
        self.router.engine(lease.node).release(stream, now)
        self._emptied(lease.node, now)

    def ended(self, stream: Stream, now: float) -> None:
        self._tells(self._placed[stream].decode, now)
        self._done(stream, now)

    def _done(self, stream: Stream, now: float) -> None:
        stream.last = now
        placed = self._placed.pop(stream)
        self.router.placer.give_back(placed)
        self.router.answered(stream)
        self._queue.correct(self._queued.pop(stream), stream.prompt + stream.output)
        self._turn(now)
        self._forget(stream)
        self._emptied(placed.decode.node, now)

    def _forget(self, stream: Stream) -> None:
        self._left -= 1
        for each in stream.then:
            each.waits -= 1
            if not each.waits:
                self._comes(each, self.clock.now + each.gap)

    def gap(self, ms: float, times: int) -> None:
        self._result.add_gap(ms, times)


def _heard(call: Callable[[], None], _: float) -> None:
    call()
