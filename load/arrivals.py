"""When requests come: the seconds at which an open loop sends, whatever became of the ones before.
Pure.

A closed loop has no arrivals: its clients ask again when they are answered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["ARRIVALS", "arrivals"]

ARRIVALS = ("poisson", "bursty", "constant", "trace")
"""`trace`: at the times of a trace, stretched to the rate; load/sessions.py knows them."""


def arrivals(kind: str, rate: float, variation: float, rng: random.Random) -> Iterator[float]:
    """Seconds from the begin, without an end, `rate` of them a second on average.

    The gaps of `bursty` are of a gamma distribution whose standard deviation is `variation` times
    its mean: 1 is Poisson, more comes in bursts.
    """
    squared, now = variation**2, 0.0
    while True:
        if kind == "constant":
            now += 1 / rate
        elif kind == "bursty":
            now += rng.gammavariate(1 / squared, squared / rate)
        else:
            now += rng.expovariate(rate)
        yield now
