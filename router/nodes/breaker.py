"""A circuit breaker for the requests of one role on one node. Pure: `now` is an argument.

Closed until FAILURES_IN_A_ROW requests have failed; then open for a time that doubles with each
opening; then half-open: one real request at a time goes through as a probe, whose success closes
it and whose failure opens it again. Only a node's own faults count: never a 4xx, a refusal, or a
client that went away.

Prior art: Nygard, Release It! (2007).
"""

from __future__ import annotations

import enum
import random
from math import inf

import msgspec

__all__ = [
    "FAILURES_IN_A_ROW",
    "OPEN_CAP_S",
    "Breaker",
    "BreakerCall",
    "BreakerState",
    "State",
    "Verdict",
]

FAILURES_IN_A_ROW = 5
OPEN_S, OPEN_CAP_S = 1.0, 60.0
JITTER = 0.2
"""An opening lasts up to this share longer, so that several routers do not probe together."""
FORGET_S = 60.0
"""A breaker that was not open for so long begins again with the shortest opening."""


class State(enum.StrEnum):
    """A breaker's state: CLOSED lets requests through, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(enum.IntEnum):
    """A decision on whether a request may go to a node, the best first.

    RESTS: not for a while, the node has no room. LAST: only if no other node is left.
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
    """A circuit breaker. Seconds are those of any one monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self.why = ""  # of the last opening
        self._rng = rng
        self._failures = 0  # in a row
        self._openings = 0  # in a row
        self._open_until = self._resting_until = -inf
        self._probe: object = None

    def state(self, now: float) -> State:
        if self._failures < FAILURES_IN_A_ROW:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def verdict(self, now: float) -> Verdict:
        state, rests = self.state(now), now < self._resting_until
        if state is State.CLOSED or (state is State.HALF_OPEN and self._probe is None):
            return Verdict.RESTS if rests else Verdict.TAKES
        return Verdict.NEVER if rests or self._probe is not None else Verdict.LAST

    def rest(self, seconds: float, now: float) -> None:
        self._resting_until = max(self._resting_until, now + seconds)

    def opens_in(self, now: float) -> float:
        open_s = self._open_until - now if self.state(now) is State.OPEN else 0.0
        return max(0.0, open_s, self._resting_until - now)

    def enter(self, call: object, now: float) -> None:
        if self._probe is None and self.state(now) is not State.CLOSED:
            self._probe = call

    def leave(self, call: object) -> None:
        if self._probe is call:
            self._probe = None

    def answered(self, call: object, now: float) -> None:
        """Note first tokens: a probe has succeeded, any other request says more with its end."""
        if self._probe is call:
            self.succeeded(call, now)

    def succeeded(self, call: object, now: float) -> None:
        """Note a success. A request that was sent before an opening changes nothing."""
        if self._probe is call:
            self._probe, self._open_until, self.why = None, now, ""
        elif self._failures >= FAILURES_IN_A_ROW:
            return
        self._failures = 0

    def failed(self, call: object, why: str, now: float) -> bool:
        """Count a failure that is the node's own fault; return whether it opens the breaker."""
        probe = self._probe is call
        self.leave(call)
        state = self.state(now)
        if state is State.OPEN or (state is State.HALF_OPEN and not probe):
            return False  # it was sent before the opening
        self._failures += 1
        if self._failures < FAILURES_IN_A_ROW:
            return False
        if now - self._open_until > FORGET_S:
            self._openings = 0
        jitter = 1 + JITTER * self._rng.random()
        self._open_until = now + min(OPEN_CAP_S, OPEN_S * 2.0 ** min(self._openings, 32) * jitter)
        self._openings += 1
        self.why = why
        return True

    def shown(self, now: float) -> BreakerState:
        return BreakerState(self.state(now), self.why, round(self.opens_in(now), 3))


class BreakerCall:
    """A request on a node, as the node's breakers see it. `close` it in any case.

    Prefill and decode count apart, also where one node does both: a decode request that computes
    its prompt itself counts for `first` until its first token, and for `then` from there on.
    """

    def __init__(self, first: Breaker, then: Breaker, now: float) -> None:
        self.answered = False  # the node has sent tokens
        self.steady = False  # further tokens say nothing new; read for every token
        self._first, self._then = first, then
        first.enter(self, now)
        then.enter(self, now)

    def heard(self, now: float) -> bool:
        """Note a frame with tokens; return whether it is the first one."""
        (self._then if self.answered else self._first).answered(self, now)
        self.steady, self.answered = self.answered, True
        return not self.steady

    def failed(self, why: str, now: float) -> bool:
        opened = (self._then if self.answered else self._first).failed(self, why, now)
        self.close()
        return opened

    def succeeded(self, now: float) -> None:
        self._first.succeeded(self, now)
        self._then.succeeded(self, now)

    def close(self) -> None:
        self._first.leave(self)
        self._then.leave(self)
