"""A circuit breaker of a node. Pure: `now` is an argument, in seconds of one monotonic clock.

Closed until FAILURES_IN_A_ROW requests have failed; then open for a second, and after each failed
trial twice as long; then half-open: one request at a time is a trial, whose success closes it. Only
a node's own faults count: never a 4xx, a refusal, or a client that left. Prior art: Nygard, Release
It! (2007).
"""

from __future__ import annotations

import enum
from math import inf

import msgspec

__all__ = ["FAILURES_IN_A_ROW", "OPEN_CAP_S", "Breaker", "BreakerState", "State", "Verdict"]

FAILURES_IN_A_ROW = 5
OPEN_CAP_S = 60.0


class State(enum.StrEnum):
    """A breaker's state: CLOSED lets requests through, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(enum.IntEnum):
    """A decision on whether a request may go to a node, the best first.

    RESTS: the node has no room for a while. LAST: only if no other node is left.
    """

    TAKES = 0
    RESTS = 1
    LAST = 2
    NEVER = 3


class BreakerState(msgspec.Struct, frozen=True):
    state: str
    reason: str = ""
    opens_in_s: float = 0.0


class Breaker:
    def __init__(self) -> None:
        self._why = ""  # of the last opening
        self._failures = 0  # in a row
        self._open_until = self._resting_until = -inf
        self._trial: object = None

    def state(self, now: float) -> State:
        if self._failures < FAILURES_IN_A_ROW:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def verdict(self, now: float) -> Verdict:
        state, rests = self.state(now), now < self._resting_until
        if state is State.CLOSED or (state is State.HALF_OPEN and self._trial is None):
            return Verdict.RESTS if rests else Verdict.TAKES
        return Verdict.NEVER if rests or self._trial is not None else Verdict.LAST

    def rest(self, seconds: float, now: float) -> None:
        self._resting_until = max(self._resting_until, now + seconds)

    def opens_in(self, now: float) -> float:
        open_s = self._open_until - now if self.state(now) is State.OPEN else 0.0
        return max(0.0, open_s, self._resting_until - now)

    def begin(self, call: object) -> None:
        if self._trial is None and self._failures >= FAILURES_IN_A_ROW:
            self._trial = call

    def end(self, call: object) -> None:
        if self._trial is call:
            self._trial = None

    def succeeded(self, call: object) -> None:
        """Note a success. A request that was sent before an opening changes nothing."""
        if self._trial is call:
            self._trial, self._why, self._failures = None, "", 0
        elif self._failures < FAILURES_IN_A_ROW:
            self._failures = 0

    def answered(self, call: object) -> None:
        """Note that a request has tokens, which is enough for a trial; others count at their end."""
        if self._trial is call:
            self.succeeded(call)

    def failed(self, call: object, why: str, now: float) -> bool:
        """Count a failure that is the node's own fault; return whether it opens the breaker."""
        trial = self._trial is call
        self.end(call)
        state = self.state(now)
        if state is State.OPEN or (state is State.HALF_OPEN and not trial):
            return False  # it was sent before the opening
        self._failures += 1
        if self._failures < FAILURES_IN_A_ROW:
            return False
        self._open_until = now + min(OPEN_CAP_S, 2.0 ** min(self._failures - FAILURES_IN_A_ROW, 32))
        self._why = why
        return True

    def shown(self, now: float) -> BreakerState:
        return BreakerState(self.state(now), self._why, round(self.opens_in(now), 3))
