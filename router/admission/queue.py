"""Decides which requests begin now, wait, or are refused. Pure: times are given, in seconds.

One bounded queue for the nodes of one model. The first begins as soon as it can be placed: by
priority, then by fair shares between keys. Shares are start-time fair queueing (Goyal, Vin, Cheng
1996): each key's virtual clock runs by cost / weight as its requests begin, and the key whose clock
is furthest behind is next. Idle keys save nothing up. Costs are estimates in tokens, which
`correct` puts right at the end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrelay.router.admission.keys import Refusal
from kvrelay.router.placement import Refuse, Wait
from kvrelay.wire.errors import KvrelayError

__all__ = ["AdmissionQueue", "QueuedRequest"]

_LATER = "try again after the time in Retry-After"


@dataclass(eq=False, slots=True)
class QueuedRequest:
    key: str
    arrived: float
    weight: float = 1.0
    priority: int = 0
    """The lower is served first, as in vLLM."""
    tokens: int = 0
    """The estimated cost: the prompt and the expected output."""
    ttft_s: float | None = None
    deadline: float = math.inf

    @property
    def begin_by(self) -> float:
        return min(self.deadline, math.inf if self.ttft_s is None else self.arrived + self.ttft_s)


E = TypeVar("E", bound=QueuedRequest)
P = TypeVar("P")


class AdmissionQueue(Generic[E, P]):
    def __init__(self, max_queue: int, find: Callable[[E], P | Wait | Refuse]) -> None:
        """`find` tells where a request would be placed, taking nothing; it raises KvrelayError."""
        self.max_queue = max_queue
        self._find = find
        self._lines: dict[int, dict[str, dict[E, None]]] = {}
        """The requests by priority and key, oldest first."""
        self._waiting: Counter[str] = Counter()
        self._clocks: defaultdict[str, float] = defaultdict(float)
        self._now = 0.0  # virtual
        self._wait_s = 0.0  # of the last that began
        self._next_late = math.inf  # no request in the queue is late before
        self._displaced: list[tuple[E, Refusal]] = []

    def __len__(self) -> int:
        return self._waiting.total()

    def __contains__(self, request: E) -> bool:
        return request in self._lines.get(request.priority, {}).get(request.key, ())

    def arrive(self, request: E, max_of_key: int = 0) -> P | Wait | Refusal:
        """Return where a new request begins now, or that it waits, or why neither.

        `max_of_key` limits how many of its key may wait; 0: no limit. Raises KvrelayError.
        """
        found = self._find(request)
        if isinstance(found, Refuse):
            return _refusal(found)
        if not (self._lines or isinstance(found, Wait)):
            self._begin(request, max(self._clocks[request.key], self._now))
            return found
        mine, waiting = self._waiting[request.key], len(self)
        if max_of_key and mine >= max_of_key:
            why = f"{mine} requests of this key wait, and its limit is {max_of_key}; {_LATER}"
            return Refusal("key_queue_full", why, self._wait_s)
        if waiting >= self.max_queue:
            full = f"{waiting} requests wait, and the limit is {self.max_queue}; {_LATER}"
            displaced = self._displaced_by(request)
            if displaced is None:
                return Refusal("queue_full", full, self._wait_s)
            self.remove(displaced)
            less = displaced.priority > request.priority
            why = "less important" if less else "of a key with more of them"
            refusal = Refusal("displaced", f"{full} (it was {why})", self._wait_s)
            self._displaced.append((displaced, refusal))
        self._next_late = min(self._next_late, request.begin_by)
        if not self._waiting[request.key]:
            self._clocks[request.key] = max(self._clocks[request.key], self._now)
        self._waiting[request.key] += 1
        self._lines.setdefault(request.priority, {}).setdefault(request.key, {})[request] = None
        return Wait("others came before")

    def remove(self, request: E) -> None:
        lines = self._lines[request.priority]
        del lines[request.key][request]
        if not lines[request.key]:
            del lines[request.key]
        if not lines:
            del self._lines[request.priority]
        self._waiting[request.key] -= 1

    def leaving(self, now: float) -> Iterator[tuple[E, P | Refusal | KvrelayError]]:
        """Yield the requests that leave the queue now, each with its place or why it has none.

        A place must be taken before the next one is asked for.
        """
        while self._displaced:
            yield self._displaced.pop()
        if now >= self._next_late:
            waiting = [
                each for lines in self._lines.values() for line in lines.values() for each in line
            ]
            for request in waiting:
                if request.begin_by <= now:
                    self.remove(request)
                    yield request, self._late(request, now)
            left = (each.begin_by for each in waiting if each.begin_by > now)
            self._next_late = min(left, default=math.inf)
        while self._lines:
            first = self._first()
            found: P | Wait | Refuse | KvrelayError
            try:
                found = self._find(first)
            except KvrelayError as why:
                found = why
            if isinstance(found, Wait) or (isinstance(found, Refuse) and not found.never):
                return  # the request is late after this target
            self.remove(first)
            if isinstance(found, Refuse):
                yield first, _refusal(found)
                continue
            if not isinstance(found, KvrelayError):
                self._wait_s = now - first.arrived
                self._begin(first, self._clocks[first.key])
            yield first, found

    def correct(self, request: E, tokens: int) -> None:
        """Put a key's clock right: a request that began has cost so many tokens."""
        clock = self._clocks[request.key]
        # Cheaper than thought is no credit: the clock is never behind the time of all.
        right = clock + (tokens - request.tokens) / request.weight
        self._clocks[request.key] = max(right, min(clock, self._now))

    def _first(self) -> E:
        lines = self._lines[min(self._lines)]
        return next(iter(lines[min(lines, key=self._clocks.__getitem__)]))

    def _begin(self, request: E, start: float) -> None:
        self._now = max(self._now, start)
        self._clocks[request.key] = start + request.tokens / request.weight

    def _displaced_by(self, request: E) -> E | None:
        """Return which request leaves a full queue for a new one; None: the new one itself.

        The newest of the least important, of the key with most places by its weight; among equals
        only if that key would still have more than the new one's.
        """
        worst = max(self._lines, default=request.priority - 1)
        if worst < request.priority:
            return None
        lines = self._lines[worst]

        def places(key: str) -> float:
            return self._waiting[key] / next(iter(lines[key])).weight

        largest = max(lines, key=places)
        mine = (self._waiting[request.key] + 1) / request.weight
        if worst == request.priority and (largest == request.key or places(largest) <= mine):
            return None
        return next(reversed(lines[largest]))

    def _late(self, request: E, now: float) -> Refusal:
        waited = now - request.arrived
        if request.deadline <= now:
            why = (
                f"the request waited for {waited:.1f} s, until its deadline, and no node had "
                f"room; try again later"
            )
            return Refusal("deadline", why, None)
        target = f"its target for the first token is {request.ttft_s or 0.0:g} s"
        why = f"the request waited for {waited:.2f} s, and {target}; {_LATER}"
        return Refusal("ttft_passed", why, self._wait_s)


def _refusal(why: Refuse) -> Refusal:
    limit = f"the target is {why.limit_ms:g} ms"
    if why.what == "tpot":
        takes = f"a token takes about {why.expected_ms:.1f} ms on an idle node"
        return Refusal("tpot_never", f"{takes}, and {limit}; send a higher one", None)
    if why.never:
        takes = f"the first token of this prompt takes about {why.expected_ms:.0f} ms without any"
        remedy = "send a shorter prompt or a higher target"
        return Refusal("ttft_never", f"{takes} queue, and {limit}; {remedy}", None)
    takes = f"the first token would take about {why.expected_ms:.0f} ms"
    later = f"{_LATER}, or send a higher target"
    return Refusal("ttft", f"{takes}, and {limit}; {later}", (why.expected_ms - why.limit_ms) / 1e3)
