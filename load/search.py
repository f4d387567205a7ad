"""The highest rate at which enough requests meet their targets, found by few probes. Pure.

The rate is doubled or halved until one holds and one does not, then bisected geometrically.
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
        self._lowest = 1.0 if whole else start * _LOWEST_SHARE
        self._holds, self._breaks, self._why = 0.0, math.inf, ""
        self.rate: float | None = start
        """The rate to probe now; None when the search has ended."""

    def record(self, attainment: float) -> None:
        """Note the share of requests that met their targets at `rate`; nan without requests."""
        assert self.rate is not None
        if attainment >= self._attainment:
            self._holds = self.rate
        else:
            self._breaks = self.rate
        self.rate = self._next_rate()
        self._left -= 1
        if self.rate is not None and self._left <= 0:
            self.stop("the search ended early: it takes too many probes")

    def stop(self, why: str) -> None:
        self.rate, self._why = None, why

    def result(self) -> SearchResult:
        breaks = None if math.isinf(self._breaks) else self._breaks
        return SearchResult(self._holds, breaks, self._attainment, self._why)

    def _next_rate(self) -> float | None:
        low, high = self._holds, self._breaks
        if math.isinf(high):
            return low * 2
        if not low:
            half = high // 2 if self._whole else high / 2
            return half if half >= self._lowest else None
        middle = math.sqrt(low * high)
        if self._whole:
            middle = min(max(round(middle), low + 1), high - 1)
        return None if high / low <= 1 + self._precision or middle <= low else middle
