"""Whether a decode node has time left to compute a prompt between the steps of those that run there. Pure.

A stall delays all who run. How much of it they can bear follows from their target of time per token, and from how long
a step takes now: that is measured, so stalls of late are in it.
"""

from __future__ import annotations

import math
from typing import Protocol

__all__ = ["SPARE", "Rates", "Streaming", "ahead_ms", "stalled_ms"]

SPARE = 0.8
"""What is reckoned is in time with a fifth to spare: it is not known better."""
# Who runs is half through on average: a stall counts twice in what is left of its time per token.
_STALLS = 2.0
# No stall lasts longer than this many steps of the target, however much time there is.
_MOST_TARGET_STEPS = 3.0


class Rates(Protocol):
    """Measured speeds of a node, in milliseconds."""

    def prefill_ms(self, tokens: float) -> float:
        """To compute so many tokens of a prompt."""
        ...

    def prompts_ms(self, tokens: float) -> float:
        """To compute so many tokens of nobody knows how many prompts."""
        ...

    def step_ms(self, running: float) -> float:
        """One decode step with so many running requests."""
        ...

    def output_tokens(self, limit: int = 0) -> float:
        """How long an answer will probably be that may have `limit` tokens (0: any number)."""
        ...


class Streaming(Protocol):
    """A decode node: requests there, tokens of prompts that it has yet to compute."""

    @property
    def requests(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def rates(self) -> Rates: ...


def ahead_ms(node: Streaming, uncached: int) -> float:
    """Milliseconds until the prompts are computed that are there, if they are like one of so many tokens: the first is
    half computed on average."""
    return node.rates.prompts_ms(node.tokens - min(node.tokens, uncached) / 2)


def stalled_ms(node: Streaming, uncached: int, tpot_ms: float) -> float:
    """Milliseconds until so many tokens of a prompt are computed there; infinite if the streams cannot spare that."""
    rates = node.rates
    computed_ms = rates.prefill_ms(uncached)
    if computed_ms > _MOST_TARGET_STEPS * tpot_ms:
        return math.inf
    alone_ms = ahead_ms(node, uncached) + computed_ms
    step_ms = rates.step_ms(node.requests + 1)
    mean_ms = step_ms + _STALLS * alone_ms / max(1.0, rates.output_tokens())
    return alone_ms + step_ms if mean_ms <= SPARE * tpot_ms else math.inf
