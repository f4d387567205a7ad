"""A simulated cluster: requests, routers, prefill and decode nodes on one virtual clock, in milliseconds.

Reports of load reach routers as they do in reality, with the ticket and the end of each leg and with a poll twice a
second, but `stale_ms` later, and KV events 5 ms later still. What a node says of a leg itself (that it has begun, how
long it took) is known at once. Left out: failures, admission, prompts that a decode node computes, and the queue for
room at the router: a leg that finds none anywhere waits at its node.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.decode_node import DecodeNode
from benchmarks.simulation.prefill_node import PrefillNode
from benchmarks.simulation.routers import Omniscient, Router
from benchmarks.simulation.stream import Speeds, Stream
from wire.config import Role
from wire.outputs import Load

__all__ = ["OMNISCIENT", "Result", "Setting", "simulate"]

OMNISCIENT = "omniscient"
POLL_MS = 500.0
_KV_EVENT_MS = 5.0
_POLL_SLICES = 50
_PERCENT = math.log(1.01)


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one run. `policy` is one of router/policies/by_name.py for both roles, or OMNISCIENT."""

    policy: str = "cost"
    prefill: int = 8
    decode: int = 8
    routers: int = 1
    stale_ms: float = 0.0
    seed: int = 0
    block_tokens: int = 128
    prefixes: bool = True
    """Whether routers know of prefixes at all."""
    shortest_first: bool = True
    speeds: Speeds = field(default_factory=Speeds)


@dataclass(slots=True)
class Result:
    """All streams with their fate, and the times between tokens: how often each, in steps of one percent."""

    setting: Setting
    streams: Sequence[Stream]
    gaps: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    events: int = 0

    def add_gap(self, ms: float, times: int) -> None:
        """So long between two tokens, so often."""
        step = int(math.log(max(ms, 1e-3)) / _PERCENT)
        self.gaps[step] = self.gaps.get(step, 0) + times

    def gap_ms(self, share: float) -> float:
        """This share of the times between tokens is at most so long."""
        left = share * sum(self.gaps.values())
        for step in sorted(self.gaps):
            left -= self.gaps[step]
            if left <= 0:
                break
        return math.exp((step + 0.5) * _PERCENT) if self.gaps else 0.0


def simulate(streams: Sequence[Stream], setting: Setting) -> Result:
    """Serve these requests, in the order of their arrival, until all have ended."""
    return _World(streams, setting).run()


Call = Callable[[float], None]


class _World:
    def __init__(self, streams: Sequence[Stream], setting: Setting) -> None:
        self._setting = setting
        self._streams = streams
        self._result = Result(setting, streams)
        self._heap: list[tuple[float, int, Call]] = []
        self._scheduled = 0
        self._left = len(streams)
        self._news: deque[tuple[float, Call]] = deque()
        self._kv_news: deque[tuple[float, Call]] = deque()
        self._placed: dict[Stream, list[int]] = {}
        """Router, prefill node, decode node."""
        self._exposed: dict[Stream, float] = {}
        speeds, block_tokens = setting.speeds, setting.block_tokens
        self._prefill = [
            PrefillNode(
                speeds, block_tokens, self._later, self._begins, self._prefilled, shortest_first=setting.shortest_first
            )
            for _ in range(setting.prefill)
        ]
        self._decode = [
            DecodeNode(speeds, block_tokens, self._later, self._fetched, self._ended, self._result.add_gap)
            for _ in range(setting.decode)
        ]
        self._rng = random.Random(f"clients {setting.seed}")
        self._routers: list[Router] = []
        self._omniscient: Omniscient | None = None
        if setting.policy == OMNISCIENT:
            self._omniscient = Omniscient(speeds, self._prefill, self._decode, f"omniscient {setting.seed}")
        else:
            loads = self._prefill[0].load(0.0), self._decode[0].load(0.0)
            self._routers = [
                Router(
                    (setting.policy, setting.policy),
                    (setting.prefill, setting.decode),
                    loads,
                    f"router {at} {setting.seed}",
                    block_tokens if setting.prefixes else 0,
                )
                for at in range(setting.routers)
            ]

    def run(self) -> Result:
        """Once."""
        heap, news, kv_news = self._heap, self._news, self._kv_news
        for number, stream in enumerate(self._streams):
            stream.number = number
            self._later(stream.at, self._arrival(stream))
        for at in range(_POLL_SLICES if self._routers else 0):
            self._later(at * POLL_MS / _POLL_SLICES, self._poll(at))
        while self._left:
            now, _, call = heapq.heappop(heap)
            self._result.events += 1
            while news and news[0][0] <= now:
                news.popleft()[1](now)
            while kv_news and kv_news[0][0] <= now:
                kv_news.popleft()[1](now)
            call(now)
        self._result.preemptions = sum(node.preemptions for node in self._decode)
        return self._result

    def _later(self, at: float, call: Call) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (at, self._scheduled, call))

    # --- a request's way -----------------------------------------------------------------------------------------

    def _arrival(self, stream: Stream) -> Call:
        def arrives(now: float) -> None:
            if self._omniscient is not None:
                router, node = -1, self._omniscient.choose_prefill(stream, now)
            else:
                router = self._rng.randrange(len(self._routers))
                node = self._routers[router].prefill(stream)
            self._placed[stream] = [router, node, -1]
            self._prefill[node].submit(stream, now)

        return arrives

    def _begins(self, stream: Stream, now: float) -> None:
        """The ticket comes, and the decode leg goes out."""
        placed = self._placed[stream]
        router, prefill, _ = placed
        if self._omniscient is not None:
            decode = self._omniscient.choose_decode(stream, now)
        else:
            decode = self._routers[router].decode(stream)
            self._report(Role.PREFILL, prefill, router, now)
            self._tell_kv(Role.PREFILL, prefill, now)
        placed[2] = decode
        self._decode[decode].submit(stream, now)

    def _prefilled(self, stream: Stream, now: float, waited_ms: float, took_ms: float) -> None:
        router, prefill, decode = self._placed[stream]
        stream.first = now
        if self._routers:
            self._routers[router].prefilled(stream, waited_ms, took_ms)
            self._report(Role.PREFILL, prefill, router, now)
        last_chunk = (stream.prompt - stream.cached - 1) % self._setting.speeds.step_tokens + 1
        self._decode[decode].computed(stream, last_chunk, now)

    def _fetched(self, stream: Stream, now: float, exposed_ms: float) -> None:
        router, prefill, decode = self._placed[stream]
        self._exposed[stream] = exposed_ms
        if self._routers:
            self._routers[router].fetched(stream)
            self._tell_kv(Role.DECODE, decode, now)
        self._prefill[prefill].release(stream, now)

    def _ended(self, stream: Stream, now: float, took_ms: float, queued_ms: float) -> None:
        router, prefill, decode = self._placed.pop(stream)
        stream.last = now
        exposed_ms = self._exposed.pop(stream)
        if self._routers:
            self._routers[router].ended(stream, took_ms, exposed_ms, prefill)
            self._report(Role.DECODE, decode, router, now)
            self._tell_kv(Role.DECODE, decode, now)
        self._left -= 1

    # --- what routers are told -----------------------------------------------------------------------------------

    def _report(self, role: Role, at: int, router: int, now: float) -> None:
        load = (self._prefill if role is Role.PREFILL else self._decode)[at].load(now)
        told = self._routers[router]
        self._tell(now, lambda then: told.reported(role, at, load, then, polled=False))

    def _tell(self, now: float, call: Call) -> None:
        if self._setting.stale_ms:
            self._news.append((now + self._setting.stale_ms, call))
        else:
            call(now)

    def _poll(self, piece: int) -> Call:
        """Every router asks its share of the nodes, each at another time."""

        def polls(now: float) -> None:
            for number, router in enumerate(self._routers):
                for role, nodes in ((Role.PREFILL, self._prefill), (Role.DECODE, self._decode)):
                    for at in range((piece + 7 * number) % _POLL_SLICES, len(nodes), _POLL_SLICES):
                        load = nodes[at].load(now)
                        self._tell(now, _polled(router, role, at, load))
            self._later(now + POLL_MS, polls)

        return polls

    def _tell_kv(self, role: Role, at: int, now: float) -> None:
        if not self._setting.prefixes:
            return
        stored, removed = (self._prefill if role is Role.PREFILL else self._decode)[at].cache.news()
        if stored or removed:
            due = now + self._setting.stale_ms + _KV_EVENT_MS
            self._kv_news.append((due, lambda _: self._tell_all_kv(role, at, stored, removed)))

    def _tell_all_kv(self, role: Role, at: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        for router in self._routers:
            router.kv_events(role, at, stored, removed)


def _polled(router: Router, role: Role, at: int, load: Load) -> Call:
    return lambda then: router.reported(role, at, load, then, polled=True)
