"""How many legs may be tried again without multiplying the load of a cluster that is in trouble.
Pure.

A share of the requests of the last seconds, and a few beside them. Only for legs that nodes have
answered badly or not at all: what a lost process was doing must be done elsewhere, and its place is
free.

Prior art: retry budgets of Finagle and Linkerd.
"""

from __future__ import annotations

__all__ = ["FLOOR", "SHARE", "WINDOW_S", "RetryBudget"]

SHARE = 0.2
FLOOR = 10
WINDOW_S = 10


class RetryBudget:
    """Counts by the second. Times are those of any one monotonic clock."""

    def __init__(self) -> None:
        self._second = 0
        self._requests = [0] * WINDOW_S
        self._retries = [0] * WINDOW_S

    def asked(self, now: float) -> None:
        """A request has come."""
        self._turn(now)
        self._requests[self._second % WINDOW_S] += 1

    def take(self, now: float) -> bool:
        """Whether a leg may be tried again now; if so it is counted."""
        self._turn(now)
        if sum(self._retries) >= FLOOR + SHARE * sum(self._requests):
            return False
        self._retries[self._second % WINDOW_S] += 1
        return True

    def _turn(self, now: float) -> None:
        second = int(now)
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._requests[passed % WINDOW_S] = self._retries[passed % WINDOW_S] = 0
        self._second = max(self._second, second)
