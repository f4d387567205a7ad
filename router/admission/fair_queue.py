"""Who waits for a turn, and in which order: by priority, then by fair shares between keys. Pure,
and knows no time.

Shares are start-time fair queueing (Goyal, Vin, Cheng 1996): each key has a virtual clock that runs
by cost / weight as its requests begin, and the key whose clock is furthest behind is next. Over any
time in which two keys both wait, what they began differs by no more than the costliest request of
each, by weight; who was idle saves nothing up. Costs are estimates in tokens; `correct` puts the
clock right when a request has ended.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Entrant", "FairQueue"]


@dataclass(eq=False, slots=True)
class Entrant:
    """A request that wants a turn. Times are seconds of one clock, counts are tokens."""

    key: str
    arrived: float
    weight: float = 1.0
    priority: int = 0
    """As vLLM has it: the lower is served first."""
    tokens: int = 0
    """What its turn costs: its prompt, and what it is expected to generate."""
    ttft_s: float | None = None
    """Target for the first token, from `arrived`; None: there is none."""
    deadline: float = math.inf

    @property
    def begin_by(self) -> float:
        """When it must have begun for its deadline, and for its target."""
        return min(self.deadline, math.inf if self.ttft_s is None else self.arrived + self.ttft_s)


E = TypeVar("E", bound=Entrant)


class FairQueue(Generic[E]):
    """An unbounded queue. All sizes are in requests."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, dict[E, None]]] = {}
        """By priority and key, those that wait, oldest first."""
        self._waiting: Counter[str] = Counter()
        """By key."""
        self._clocks: defaultdict[str, float] = defaultdict(float)
        """By key, the virtual time at which its next request starts."""
        self._now = 0.0  # virtual
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[E]:
        return (
            entrant for lines in self._lines.values() for line in lines.values() for entrant in line
        )

    def __contains__(self, entrant: E) -> bool:
        return entrant in self._lines.get(entrant.priority, {}).get(entrant.key, ())

    def waiting(self, key: str) -> int:
        """Return how many requests of a key wait."""
        return self._waiting[key]

    def push(self, entrant: E) -> None:
        """Let it wait behind those of its key that are as important."""
        key = entrant.key
        if not self._waiting[key]:
            self._clocks[key] = max(self._clocks[key], self._now)
        self._waiting[key] += 1
        self._lines.setdefault(entrant.priority, {}).setdefault(key, {})[entrant] = None
        self._length += 1

    def remove(self, entrant: E) -> None:
        """Let it wait no more; it costs its key nothing. Raises KeyError if it did not wait."""
        lines = self._lines[entrant.priority]
        line = lines[entrant.key]
        del line[entrant]
        if not line:
            del lines[entrant.key]
            if not lines:
                del self._lines[entrant.priority]
        self._waiting[entrant.key] -= 1
        self._length -= 1

    def first(self) -> E | None:
        """Return who is next: of the most important ones, the oldest of the key whose clock is
        furthest behind.
        """
        if not self._lines:
            return None
        lines = self._lines[min(self._lines)]
        return next(iter(lines[min(lines, key=self._clocks.__getitem__)]))

    def begin(self, entrant: E) -> None:
        """Let its turn come, whether it waited or not: its key's clock runs on."""
        start = self._clocks[entrant.key]
        if entrant in self:
            self.remove(entrant)
        else:
            start = max(start, self._now)
        self._now = max(self._now, start)
        self._clocks[entrant.key] = start + entrant.tokens / entrant.weight

    def correct(self, entrant: E, tokens: int) -> None:
        """Note that a request that began has cost so many tokens in fact."""
        clock = self._clocks[entrant.key]
        # Cheaper than thought is no credit: the clock is not put back behind the time of all.
        right = clock + (tokens - entrant.tokens) / entrant.weight
        self._clocks[entrant.key] = max(right, min(clock, self._now))

    def displaced_by(self, entrant: E) -> E | None:
        """Return who would have to leave for this newcomer if there were no room for both; None:
        the newcomer itself.

        The newest of the least important ones, if they are less important; else, if they are as
        important, the newest of the key that has most places by its weight, as long as it would
        still have more than the newcomer's key.
        """
        if not self._lines:
            return None
        worst = max(self._lines)
        if worst < entrant.priority:
            return None
        lines = self._lines[worst]
        if worst > entrant.priority:
            return max(
                (next(reversed(line)) for line in lines.values()), key=lambda each: each.arrived
            )

        def places(key: str) -> float:
            return self._waiting[key] / next(iter(lines[key])).weight

        largest = max(lines, key=places)
        if (
            largest == entrant.key
            or places(largest) <= (self._waiting[entrant.key] + 1) / entrant.weight
        ):
            return None
        return next(reversed(lines[largest]))
