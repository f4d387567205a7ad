"""The highest rate at which enough requests meet their targets, found by few probes. Pure.

The rate is doubled or halved until one holds and one does not, then bisected geometrically. A rate
that breaks below one that holds is probed twice; if they still disagree, the lower is believed.
"""

from __future__ import annotations

import math

import msgspec

__all__ = ["RateSearch", "SearchResult"]

_MAX_PROBES = 14
_LOWEST_SHARE = 1 / 256
"""The search ends below this share of the first rate."""


class SearchResult(msgspec.Struct, frozen=True):
    """The highest rate that held (0 if none), and the lowest above it that did not (or None)."""

    holds: float
    breaks: float | None
    attainment: float
    why: str = ""


class RateSearch:
    """A search of a rate in requests a second, to within `precision` as a share, or in whole ones."""

    def __init__(
        self, start: float, attainment: float = 0.9, precision: float = 0.05, *, whole: bool = False
    ) -> None:
        self._attainment, self._precision, self._left = attainment, precision, _MAX_PROBES
        self._whole = whole
        self._rate: float | None = start
        self._lowest = 1.0 if whole else start * _LOWEST_SHARE
        self._seen: dict[float, list[float]] = {}
        self._why = ""

    @property
    def rate(self) -> float | None:
        """The rate to probe now; None when the search has ended."""
        return self._rate

    def record(self, attainment: float) -> None:
        """Note the share of requests that met their targets at `rate`; nan without requests."""
        assert self._rate is not None
        share = 0.0 if math.isnan(attainment) else attainment
        self._seen.setdefault(self._rate, []).append(share)
        self._rate = self._next_rate()
        self._left -= 1
        if self._rate is not None and self._left <= 0:
            self.stop("the search ended early: it takes too many probes")

    def stop(self, why: str) -> None:
        self._rate, self._why = None, why

    def result(self) -> SearchResult:
        low, high = self._bracket()
        why = self._why
        if not why and low and any(rate > low for rate in self._holding()):
            why = "a higher rate held, too, but one between did not, twice"
        return SearchResult(low, high, self._attainment, why)

    def _share(self, rate: float) -> float:
        return sum(self._seen[rate]) / len(self._seen[rate])

    def _holding(self) -> list[float]:
        return [rate for rate in self._seen if self._share(rate) >= self._attainment]

    def _bracket(self) -> tuple[float, float | None]:
        holding = self._holding()
        high = min((rate for rate in self._seen if rate not in holding), default=None)
        low = max((rate for rate in holding if high is None or rate < high), default=0.0)
        return low, high

    def _next_rate(self) -> float | None:
        low, high = self._bracket()
        if high is None:
            return low * 2
        if len(self._seen[high]) < 2 and any(rate > high for rate in self._holding()):
            return high
        if not low:
            half = high // 2 if self._whole else high / 2
            return half if half >= self._lowest else None
        middle = math.sqrt(low * high)
        if self._whole:
            middle = min(max(round(middle), low + 1), high - 1)
        return None if high / low <= 1 + self._precision or middle <= low else middle
