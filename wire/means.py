"""Means of what nodes and routers see, each a few numbers that forget what is old. Pure."""

from __future__ import annotations

import math

__all__ = ["MEMORY_MS", "DecayingMean", "RunningMean"]

MEMORY_MS = 4_000.0
"""Means of nodes and routers are over about so long."""


class DecayingMean:
    """An exponential mean of what comes per millisecond.

    `now` is in milliseconds. Time never goes back: an older `now` counts as the newest.
    """

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value, self._at = 0.0, -math.inf

    def at(self, now: float) -> float:
        """Return the mean now."""
        return (
            self._value * math.exp((self._at - now) / MEMORY_MS) if now > self._at else self._value
        )

    def add(self, amount: float, now: float) -> None:
        """Count what has come; a negative amount takes back."""
        self._value, self._at = max(0.0, self.at(now) + amount / MEMORY_MS), max(now, self._at)


class RunningMean:
    """A mean of all values while they are few, then of about the newest `memory`.

    `first` counts as one value: what is expected until any was seen.
    """

    __slots__ = ("_memory", "_seen", "value")

    def __init__(self, first: float, memory: int) -> None:
        self.value, self._memory, self._seen = first, memory, 1

    def add(self, value: float) -> None:
        """Count one more value."""
        self._seen = min(self._seen + 1, self._memory)
        self.value += (value - self.value) / self._seen
