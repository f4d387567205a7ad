"""Decides which requests begin now, wait, or are refused. Pure: times are given, in seconds.

One bounded queue for the nodes of one model. The first begins as soon as it can be placed: by
priority, then by fair shares between keys. Shares are start-time fair queueing (Goyal, Vin, Cheng
1996): each key's virtual clock runs by cost / weight as its requests begin, and the key whose clock
is furthest behind is next. Idle keys save nothing up. Costs are estimates in tokens, which
`correct` puts right at the end.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
        self._lines: dict[tuple[int, str], dict[E, None]] = {}
        """The requests by priority and key, oldest first."""
        self._clocks: defaultdict[str, float] = defaultdict(float)
        self._now = 0.0  # virtual
        self._wait_s = 0.0  # of the last that began
        self._next_late = math.inf  # no request in the queue is late before

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self, key: str) -> int:
        return sum(len(line) for (_, each), line in self._lines.items() if each == key)

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
        mine, waiting = self.waiting(request.key), len(self)
        if max_of_key and mine >= max_of_key:
            why = f"{mine} requests of this key wait, and its limit is {max_of_key}; {_LATER}"
            return Refusal("key_queue_full", why, self._wait_s)
        if waiting >= self.max_queue:
            why = f"{waiting} requests wait, and the limit is {self.max_queue}; {_LATER}"
            return Refusal("queue_full", why, self._wait_s)
        self._next_late = min(self._next_late, request.begin_by)
        if not mine:
            self._clocks[request.key] = max(self._clocks[request.key], self._now)
        self._lines.setdefault((request.priority, request.key), {})[request] = None
        return Wait("others came before")

    def remove(self, request: E) -> bool:
        """Take a request out, and return whether it was in."""
        line = self._lines.get((request.priority, request.key), {})
        if request not in line:
            return False
        del line[request]
        if not line:
            del self._lines[request.priority, request.key]
        return True

    def leaving(self, now: float) -> Iterator[tuple[E, P | Refusal | KvrelayError]]:
        """Yield the requests that leave the queue now, each with its place or why it has none.

        A place must be taken before the next one is asked for.
        """
        if now >= self._next_late:
            waiting = [each for line in self._lines.values() for each in line]
            for request in waiting:
                if request.begin_by <= now:
                    self.remove(request)
                    yield request, self._late(request, now)
            left = (each.begin_by for each in waiting if each.begin_by > now)
            self._next_late = min(left, default=math.inf)
        while self._lines:
            first = self._first()
            found: P | Wait | Refuse | Refusal | KvrelayError
            try:
                found = self._find(first)
            except KvrelayError as why:
                found = why
            if isinstance(found, Wait):
                return
            if isinstance(found, Refuse):
                found = _refusal(found)
            self.remove(first)
            if not isinstance(found, Refusal | KvrelayError):
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
        first = min(self._lines, key=lambda line: (line[0], self._clocks[line[1]]))
        return next(iter(self._lines[first]))

    def _begin(self, request: E, start: float) -> None:
        self._now = max(self._now, start)
        self._clocks[request.key] = start + request.tokens / request.weight

    def _late(self, request: E, now: float) -> Refusal:
        waited = f"the request waited for {now - request.arrived:.2f} s"
        if request.deadline <= now:
            why = f"{waited}, until its deadline, and no node had room; try again later"
            return Refusal("deadline", why, None)
        why = f"{waited}, and its target for the first token is {request.ttft_s:g} s; {_LATER}"
        return Refusal("ttft_passed", why, self._wait_s)


def _refusal(why: Refuse) -> Refusal:
    what = "the first token" if why.what == "ttft" else "a token"
    takes = f"{what} would take about {why.expected_ms:.1f} ms"
    limit = f"the target is {why.limit_ms:g} ms"
    if why.never:
        message = (
            f"{takes} even on an idle node, and {limit}; send a higher one or a shorter prompt"
        )
        return Refusal(f"{why.what}_never", message, None)
    message = f"{takes}, and {limit}; {_LATER}, or send a higher target"
    return Refusal(why.what, message, (why.expected_ms - why.limit_ms) / 1e3)
