"""Output tokens are counted while they flow: once a second, by what each answer under way has more
than before.

Nothing is counted per token, which would cost as much as all else that the router does for one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.router.metrics import Metrics

__all__ = ["LOOK_S", "Answer", "Flow"]

LOOK_S = 1.0


class Answer(Protocol):
    """The walk of a request, by its identity."""

    @property
    def output_tokens(self) -> int: ...


@dataclass(slots=True)
class _Known:
    """What was counted of one answer. `key` is the name of its API key."""

    key: str
    model: str
    tokens: int = 0


class Flow:
    """All answers under way in one process."""

    def __init__(self, metrics: Metrics, flowed: Callable[[float, int], None]) -> None:
        """`flowed` is told too: the monotonic time, and how many tokens more there are."""
        self._metrics, self._flowed = metrics, flowed
        self._known: dict[Answer, _Known] = {}
        metrics.running.read = lambda: Counter(known.model for known in self._known.values())

    def begins(self, answer: Answer, key: str, model: str) -> None:
        """A request begins, or waits; `ends` must follow."""
        self._known[answer] = _Known(key, model)

    def ends(self, answer: Answer, now: float) -> str:
        """Count what is left of an answer; its model."""
        known = self._known.pop(answer)
        self._count(answer, known, now)
        return known.model

    def look(self, now: float) -> None:
        """Count what came since the last look."""
        for answer, known in self._known.items():
            self._count(answer, known, now)

    def _count(self, answer: Answer, known: _Known, now: float) -> None:
        more = answer.output_tokens - known.tokens
        if more <= 0:  # or begun anew, by a node that tells the same again
            return
        known.tokens += more
        self._metrics.output_tokens.add(more, known.model)
        self._metrics.admission.tokens.add(more, known.key, "output")
        self._flowed(now, more)

    async def look_for_ever(self) -> None:
        """Look every LOOK_S, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic())
