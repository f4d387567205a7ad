"""Which nodes are so much worse than the others that they are taken out for a while. Pure: `now` is an argument.

Of each node it keeps what its last legs were like: whether they failed, how long the first frame took and the gap
between tokens. A node is an outlier if it has failed far oftener than the others, or if its median time is both RATIO
times the others' median and, where there are enough of them to tell, far outside their spread (median absolute
deviation). Times that are long for all are nobody's fault. At most MOST of the nodes are out at once, never the last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

import msgspec

__all__ = ["EVERY_S", "MOST", "Sample", "Samples", "outliers"]

WINDOW_S = 60.0
KEPT = 128
ENOUGH = 12
"""Samples of a node before anything is said of it, or by it of others."""
EVERY_S = 1.0
"""Looking more often finds nothing new."""
MOST = 1 / 3
FAILED_SHARE, FAILED_TIMES = 0.3, 3.0
RATIO = 4.0
LEAST_S = {"first_s": 0.5, "gap_s": 0.02}
"""Differences below these are nobody's concern, whatever their ratio."""
DEVIATIONS = 6.0
SPREAD_OF = 5
"""So many others have a spread."""
_MAD = 1.4826  # of a normal distribution: standard deviations per median absolute deviation


class Sample(msgspec.Struct, frozen=True):
    """One leg, or of one that goes on a part. `first_s`, `gap_s`: seconds, None where they say nothing of the node."""

    at: float
    failed: bool = False
    ended: bool = True
    """Each leg is that once: shares are of those."""
    first_s: float | None = None
    gap_s: float | None = None


@dataclass(slots=True)
class Samples:
    """What one node's last legs were like."""

    legs: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))

    def recent(self, now: float) -> list[Sample]:
        """Those of the window."""
        while self.legs and self.legs[0].at <= now - WINDOW_S:
            self.legs.popleft()
        return list(self.legs)


def outliers(samples: Mapping[str, Samples], out: Collection[str], now: float) -> dict[str, str]:
    """Which of the nodes to take out now, each with a clause that says why; `out` are those that are out already.

    The worst comes first if not all of them may be taken out."""
    recent = {
        node: legs for node, each in samples.items() if node not in out if len(legs := each.recent(now)) >= ENOUGH
    }
    room = min(len(samples) - 1, max(1, math.floor(MOST * len(samples)))) - len(out)
    found: list[tuple[float, str, str]] = []
    for node, legs in recent.items():
        others = {other: theirs for other, theirs in recent.items() if other != node}
        verdicts = [_failures(legs, others), *(_slow(name, legs, others) for name in LEAST_S)]
        worst = max((verdict for verdict in verdicts if verdict is not None), default=None)
        if worst is not None:
            found.append((*worst, node))
    found.sort(reverse=True)
    return {node: why for _, why, node in found[: max(0, room)]}


def _failures(legs: list[Sample], others: Mapping[str, list[Sample]]) -> tuple[float, str] | None:
    share = _failed_share(legs)
    theirs = [known for leg in others.values() if (known := _failed_share(leg)) is not None]
    usual = median(theirs) if theirs else 1.0
    if share is None or share < FAILED_SHARE or share <= FAILED_TIMES * usual:
        return None
    return share / max(usual, 0.01), f"{share:.0%} of its legs failed, of the others' {usual:.0%}"


def _failed_share(legs: list[Sample]) -> float | None:
    ended = sum(leg.ended for leg in legs)
    return sum(leg.failed for leg in legs) / ended if ended >= ENOUGH else None


def _slow(name: str, legs: list[Sample], others: Mapping[str, list[Sample]]) -> tuple[float, str] | None:
    mine = _median(name, legs)
    theirs = [time for leg in others.values() if (time := _median(name, leg)) is not None]
    if mine is None or not theirs:
        return None
    usual = median(theirs)
    if mine < RATIO * usual or mine - usual < LEAST_S[name]:
        return None
    if len(theirs) >= SPREAD_OF and mine - usual < DEVIATIONS * _MAD * median(abs(time - usual) for time in theirs):
        return None
    what = "first frame" if name == "first_s" else "gap between tokens"
    return mine / max(usual, 1e-6), f"its {what} takes {mine * 1e3:.0f} ms, the others' {usual * 1e3:.0f} ms"


def _median(name: str, legs: list[Sample]) -> float | None:
    times = [time for leg in legs if (time := getattr(leg, name)) is not None]
    return median(times) if len(times) >= ENOUGH else None
