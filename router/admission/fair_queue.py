"""A queue of requests: by priority, then by fair shares between keys. Pure, and knows no time.

Shares are start-time fair queueing (Goyal, Vin, Cheng 1996): each key has a virtual clock that runs
by cost / weight as its requests begin, and the key whose clock is furthest behind is next. Who was
idle saves nothing up. Costs are estimates in tokens; `correct` puts the clock right at the end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["FairQueue", "QueuedRequest"]


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits to begin. Times are seconds of one clock."""

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


class FairQueue(Generic[E]):
    """An unbounded queue. All sizes are in requests."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, dict[E, None]]] = {}
        """The requests by priority and key, oldest first."""
        self._waiting: Counter[str] = Counter()
        self._clocks: defaultdict[str, float] = defaultdict(float)
        self._now = 0.0  # virtual
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[E]:
        return (
            request for lines in self._lines.values() for line in lines.values() for request in line
        )

    def __contains__(self, request: E) -> bool:
        return request in self._lines.get(request.priority, {}).get(request.key, ())

    def waiting(self, key: str) -> int:
        return self._waiting[key]

    def push(self, request: E) -> None:
        key = request.key
        if not self._waiting[key]:
            self._clocks[key] = max(self._clocks[key], self._now)
        self._waiting[key] += 1
        self._lines.setdefault(request.priority, {}).setdefault(key, {})[request] = None
        self._length += 1

    def remove(self, request: E) -> None:
        lines = self._lines[request.priority]
        line = lines[request.key]
        del line[request]
        if not line:
            del lines[request.key]
            if not lines:
                del self._lines[request.priority]
        self._waiting[request.key] -= 1
        self._length -= 1

    def first(self) -> E | None:
        """Return the next request: of the best priority, the oldest of the most lagging key."""
        if not self._lines:
            return None
        lines = self._lines[min(self._lines)]
        return next(iter(lines[min(lines, key=self._clocks.__getitem__)]))

    def begin(self, request: E) -> None:
        start = self._clocks[request.key]
        if request in self:
            self.remove(request)
        else:
            start = max(start, self._now)
        self._now = max(self._now, start)
        self._clocks[request.key] = start + request.tokens / request.weight

    def correct(self, request: E, tokens: int) -> None:
        clock = self._clocks[request.key]
        # Cheaper than thought is no credit: the clock is not put back behind the time of all.
        right = clock + (tokens - request.tokens) / request.weight
        self._clocks[request.key] = max(right, min(clock, self._now))

    def displaced_by(self, request: E) -> E | None:
        """Return which request would have to leave for a new one; None: the new one itself.

        The newest of the least important; among equals that of the key with most places by its
        weight, if it would still have more than the new one's key.
        """
        if not self._lines:
            return None
        worst = max(self._lines)
        if worst < request.priority:
            return None
        lines = self._lines[worst]
        if worst > request.priority:
            newest = (next(reversed(line)) for line in lines.values())
            return max(newest, key=lambda each: each.arrived)

        def places(key: str) -> float:
            return self._waiting[key] / next(iter(lines[key])).weight

        largest = max(lines, key=places)
        mine = (self._waiting[request.key] + 1) / request.weight
        if largest == request.key or places(largest) <= mine:
            return None
        return next(reversed(lines[largest]))
