"""Who waits for a turn, and in which order: by priority, then by fair shares between keys. Pure, and knows no time.

Shares are start-time fair queueing (Goyal, Vin, Cheng 1996): each key has a virtual clock that runs by cost / weight as
its requests begin, and the key whose clock is furthest behind is next. Over any time in which two keys both wait, what
they began differs by no more than the costliest request of each, by weight; who was idle saves nothing up. Costs are
estimates in tokens; `correct` puts the clock right when a request has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["FairQueue", "Entrant"]


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
    deadline: float = float("inf")
    begin_by: float = float("inf")
    """When it must have begun for its deadline, and for its target as was known when it lined up."""
    charged: float = 0.0
    """Tokens by which its key's clock has run for it."""


@dataclass(eq=False, slots=True)
class _Key:
    clock: float = 0.0
    """Virtual time at which its next request starts."""
    waiting: int = 0


@dataclass(eq=False, slots=True)
class _Line:
    """Requests of one key and one priority, oldest first."""

    entrants: dict[Entrant, None] = field(default_factory=dict)


class FairQueue:
    """Holds entrants, unbounded. All sizes are in requests."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._lines: dict[int, dict[str, _Line]] = {}
        self._now = 0.0  # virtual
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entrant]:
        return (entrant for lines in self._lines.values() for line in lines.values() for entrant in line.entrants)

    def __contains__(self, entrant: Entrant) -> bool:
        line = self._lines.get(entrant.priority, {}).get(entrant.key)
        return line is not None and entrant in line.entrants

    def waiting(self, key: str) -> int:
        """How many requests of a key wait."""
        known = self._keys.get(key)
        return known.waiting if known else 0

    def push(self, entrant: Entrant) -> None:
        """Let it wait behind those of its key that are as important."""
        key = self._keys.setdefault(entrant.key, _Key())
        if not key.waiting:
            key.clock = max(key.clock, self._now)
        key.waiting += 1
        line = self._lines.setdefault(entrant.priority, {}).setdefault(entrant.key, _Line())
        line.entrants[entrant] = None
        self._length += 1

    def remove(self, entrant: Entrant) -> None:
        """It waits no more, and costs its key nothing. KeyError if it did not wait."""
        lines = self._lines[entrant.priority]
        line = lines[entrant.key]
        del line.entrants[entrant]
        if not line.entrants:
            del lines[entrant.key]
            if not lines:
                del self._lines[entrant.priority]
        self._keys[entrant.key].waiting -= 1
        self._length -= 1

    def first(self) -> Entrant | None:
        """Who is next: of the most important ones, the oldest of the key whose clock is furthest behind."""
        if not self._lines:
            return None
        lines = self._lines[min(self._lines)]
        key = min(lines, key=lambda name: self._keys[name].clock)
        return next(iter(lines[key].entrants))

    def begin(self, entrant: Entrant) -> None:
        """Its turn has come, whether it waited or not: its key's clock runs on."""
        waited = entrant in self
        if waited:
            self.remove(entrant)
        key = self._keys.setdefault(entrant.key, _Key())
        start = key.clock if waited else max(key.clock, self._now)
        self._now = max(self._now, start)
        entrant.charged = float(entrant.tokens)
        key.clock = start + entrant.charged / entrant.weight

    def correct(self, entrant: Entrant, tokens: int) -> None:
        """A request that began has cost so many tokens in fact."""
        key = self._keys[entrant.key]
        # Cheaper than thought is no credit: the clock is not put back behind the time of all.
        key.clock = max(key.clock + (tokens - entrant.charged) / entrant.weight, min(key.clock, self._now))
        entrant.charged = float(tokens)

    def displaced_by(self, entrant: Entrant) -> Entrant | None:
        """Who would have to leave for this newcomer if there were no room for both; None: the newcomer itself.

        The newest of the least important ones, if they are less important; else, if they are as important, the newest
        of the key that has most places by its weight, as long as it would still have more than the newcomer's key.
        """
        if not self._lines:
            return None
        worst = max(self._lines)
        if worst < entrant.priority:
            return None
        lines = self._lines[worst]
        if worst > entrant.priority:
            return max((next(reversed(line.entrants)) for line in lines.values()), key=lambda each: each.arrived)

        def places(name: str) -> float:
            return self._keys[name].waiting / next(iter(lines[name].entrants)).weight

        largest = max(lines, key=places)
        if largest == entrant.key or places(largest) <= (self.waiting(entrant.key) + 1) / entrant.weight:
            return None
        return next(reversed(lines[largest].entrants))
