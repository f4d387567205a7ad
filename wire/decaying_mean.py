"""A mean of what comes per millisecond, over about the last seconds. Pure: `now` is an argument, in milliseconds."""

from __future__ import annotations

import math

__all__ = ["MEMORY_MS", "DecayingMean"]

MEMORY_MS = 4_000.0
"""Means of nodes and routers are over about so long."""


class DecayingMean:
    """An exponential mean of what comes per millisecond. Time never goes back: an older `now` counts as the newest."""

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value, self._at = 0.0, -math.inf

    def at(self, now: float) -> float:
        """Return the mean now."""
        return self._value * math.exp((self._at - now) / MEMORY_MS) if now > self._at else self._value

    def add(self, amount: float, now: float) -> None:
        """Count what has come; a negative amount takes back."""
        self._value, self._at = max(0.0, self.at(now) + amount / MEMORY_MS), max(now, self._at)
