"""The highest rate at which enough requests meet their targets, found by few probes. Pure.

The rate is doubled or halved until one holds and one does not; then the geometric mean of the two
is probed until they are near enough. A rate that breaks below one that holds is probed once more,
and its probes are averaged; if they still disagree, the lower rate is believed.
"""

from __future__ import annotations

import math

import msgspec

__all__ = ["Found", "RateSearch"]


class Found(msgspec.Struct, frozen=True):
    """The highest rate that held (0 if none), and the lowest above it that did not (or None)."""

    holds: float
    breaks: float | None
    attainment: float
    why: str = ""


class RateSearch:
    """A search of a rate in requests a second.

    `precision` is how far apart the two rates of the answer may be, as a share; `stride` multiplies
    or divides the first rate.
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
        """Return the rate to probe now, None when all is known."""
        return self._next

    def know(self, rate: float, attainment: float) -> None:
        """Note what was seen before; it is no probe of this search."""
        self._seen.setdefault(rate, []).append(attainment if not math.isnan(attainment) else 0.0)
        self._next = self._following()

    def tell(self, attainment: float, rate: float | None = None) -> None:
        """Note the share that met its targets at a rate, by default the one to probe."""
        assert self._next is not None
        self.know(self._next if rate is None else rate, attainment)
        self._left -= 1
        if self._next is not None and self._left <= 0:
            self._next, self._why = None, "the search ended early: it takes too many probes"

    def stop(self, why: str) -> None:
        """End the search for a reason that is not the server's."""
        self._next, self._why = None, why

    def found(self) -> Found:
        """Return what is known by now."""
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
