"""Requests whose kind changes over time, as an office's do over a day: phases, one behind the
other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.simulator.stream import Stream

__all__ = ["Phase", "shifting"]

_SPREAD = 0.4
"""Of the logarithm of lengths."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Poisson arrivals for so long; lengths are log-normal around their medians."""

    seconds: float
    rate_s: float
    prompt: int
    output: int


def shifting(phases: Sequence[Phase], seed: int = 0) -> list[Stream]:
    """Their requests, in order."""
    rng, begins, streams = random.Random(f"shifting {seed}"), 0.0, []
    for phase in phases:
        now = begins
        ends = begins + phase.seconds * 1e3
        while (now := now + rng.expovariate(phase.rate_s) * 1e3) < ends:
            prompt = max(1, round(phase.prompt * rng.lognormvariate(0, _SPREAD)))
            streams.append(
                Stream(now, prompt, max(2, round(phase.output * rng.lognormvariate(0, _SPREAD))))
            )
        begins = ends
    return streams
