"""The highest rate at which enough requests meet their targets, found by few probes. Pure: who
probes tells of them.

First the rate is doubled, or halved (or by another stride), until one holds and one does not; then
the geometric mean of the two is probed, until they are near enough. What holds at one rate should
hold at each lower one: where a probe says otherwise the lower rate is probed once more, and its
probes are averaged. If they still disagree, the lower rate is believed.
"""

from __future__ import annotations

import math

import msgspec

__all__ = ["Found", "RateSearch"]


class Found(msgspec.Struct, frozen=True):
    """`holds` is the highest rate that was seen to hold, 0 if none did; `breaks` the lowest above
    it that did not, None if none was found. `why` says what is to be said of it, if anything.
    """

    holds: float
    breaks: float | None
    attainment: float
    why: str = ""


class RateSearch:
    """Rates are requests a second. `precision` is how far apart the two rates of the answer may be,
    as a share; `stride` is by what the first rate is multiplied or divided until the answer lies
    between two.
    """

    def __init__(
        self,
        start: float,
        wanted: float = 0.9,
        precision: float = 0.05,
        most: int = 14,
        stride: float = 2.0,
    ) -> None:
        self._wanted, self._precision, self._left, self._stride = wanted, precision, most, stride
        self._next: float | None = start
        self._least = start / 256
        self._seen: dict[float, list[float]] = {}
        self._why = ""

    def next(self) -> float | None:
        """The rate to probe now, None when all is known."""
        return self._next

    def know(self, rate: float, attainment: float) -> None:
        """What was seen before, at any rate; it is no probe of this search."""
        self._seen.setdefault(rate, []).append(attainment if not math.isnan(attainment) else 0.0)
        self._next = self._following()

    def tell(self, attainment: float, rate: float | None = None) -> None:
        """The share that met its targets at that rate, or at the one that was taken for it."""
        assert self._next is not None
        self.know(self._next if rate is None else rate, attainment)
        self._left -= 1
        if self._next is not None and self._left <= 0:
            self._next, self._why = None, "the search ended early: it takes too many probes"

    def stop(self, why: str) -> None:
        """No more probes, for this reason: the last one is not of the server."""
        self._next, self._why = None, why

    def found(self) -> Found:
        """What is known by now."""
        low, high = self._bracket()
        said = self._why
        if not said and low and any(rate > low for rate in self._holding()):
            said = "a higher rate held, too, but one between did not, twice"
        return Found(low, high, self._wanted, said)

    def _share(self, rate: float) -> float:
        return sum(self._seen[rate]) / len(self._seen[rate])

    def _holding(self) -> list[float]:
        return [rate for rate in self._seen if self._share(rate) >= self._wanted]

    def _bracket(self) -> tuple[float, float | None]:
        breaking = [rate for rate in self._seen if self._share(rate) < self._wanted]
        high = min(breaking, default=None)
        low = max((rate for rate in self._holding() if high is None or rate < high), default=0.0)
        return low, high

    def _following(self) -> float | None:
        low, high = self._bracket()
        if (
            high is not None
            and any(rate > high for rate in self._holding())
            and len(self._seen[high]) < 2
        ):
            return high
        if high is None:
            return low * self._stride
        if not low:
            return high / self._stride if high / self._stride >= self._least else None
        return None if high / low <= 1 + self._precision else math.sqrt(low * high)
