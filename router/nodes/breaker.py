"""Whether one node may be sent legs of one kind: a breaker, and how long the node has asked to be
left alone. Pure: `now` is an argument, all randomness comes from `rng`.

Closed until FAILURES_IN_A_ROW legs have failed; then open for a time that doubles with each
opening; then half-open: one real request at a time goes through as a probe, whose success closes it
and whose failure opens it again. Only a node's own faults are told here, by whoever has sent the
leg: never a 4xx, a refusal, or a client that went away.

Prior art: Nygard, Release It! (2007).
"""

from __future__ import annotations

import enum
import random

import msgspec

__all__ = ["FAILURES_IN_A_ROW", "OPEN_CAP_S", "Breaker", "BreakerSeen", "State", "Verdict"]

FAILURES_IN_A_ROW = 5
OPEN_S, OPEN_CAP_S = 1.0, 60.0
JITTER = 0.2
"""An opening lasts up to this share longer, so that several routers do not probe at one moment."""
FORGET_S = 60.0
"""Not open for so long: the next opening is the first again."""


class State(enum.StrEnum):
    """A breaker's state: CLOSED lets legs through, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(enum.IntEnum):
    """A word on whether a leg may go to a node, the best first. LAST: if there is no other; RESTS:
    not for a while.
    """

    TAKES = 0
    RESTS = 1
    LAST = 2
    NEVER = 3


class BreakerSeen(msgspec.Struct, frozen=True):
    """A breaker as others are told of it."""

    state: str
    reason: str = ""
    opens_in_s: float = 0.0


class Breaker:
    """A judge of one node's legs of one kind. Seconds are those of any one monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self.why = ""
        """Of the last opening."""
        self._rng = rng
        self._in_a_row = 0
        """Failures; closed while they are few."""
        self._openings = 0
        """In a row."""
        self._open_until = float("-inf")
        """When the last opening is over, or was."""
        self._probe: object = None
        """The leg that tries the node."""
        self._resting_until = float("-inf")

    def state(self, now: float) -> State:
        """Return the state; it is half-open as soon as the time of an opening is over."""
        if self._in_a_row < FAILURES_IN_A_ROW:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def verdict(self, now: float) -> Verdict:
        """Say whether a leg may go to the node now."""
        state, rests = self.state(now), now < self._resting_until
        if state is State.CLOSED or (state is State.HALF_OPEN and self._probe is None):
            return Verdict.RESTS if rests else Verdict.TAKES
        return Verdict.NEVER if rests or self._probe is not None else Verdict.LAST

    def rest(self, seconds: float, now: float) -> None:
        """Note that the node has no room, and says for how long."""
        self._resting_until = max(self._resting_until, now + seconds)

    def opens_in(self, now: float) -> float:
        """Return the seconds until a leg might be let through."""
        open_s = self._open_until - now if self.state(now) is State.OPEN else 0.0
        return max(0.0, open_s, self._resting_until - now)

    def enter(self, leg: object, now: float) -> None:
        """Note that a leg goes there, until it leaves: as the probe if one is due."""
        if self._probe is None and self.state(now) is not State.CLOSED:
            self._probe = leg

    def leave(self, leg: object) -> None:
        """Note that a leg has ended. Twice is as once."""
        if self._probe is leg:
            self._probe = None

    def answered(self, leg: object, now: float) -> None:
        """Note that a leg has told of tokens: a probe has succeeded, of any other leg its end says
        more.
        """
        if self._probe is leg:
            self.succeeded(leg, now)

    def succeeded(self, leg: object, now: float) -> None:
        """Note that a leg has ended well. One that was sent before an opening changes nothing."""
        if self._probe is leg:
            self._probe, self._open_until, self.why = None, now, ""
        elif self._in_a_row >= FAILURES_IN_A_ROW:
            return
        self._in_a_row = 0

    def failed(self, leg: object, why: str, now: float) -> bool:
        """Note that a leg broke by the node's own fault. Returns whether that opens the breaker."""
        probe = self._probe is leg
        self.leave(leg)
        state = self.state(now)
        if state is State.OPEN or (state is State.HALF_OPEN and not probe):
            return False  # it was sent before the opening, or before its time
        self._in_a_row += 1
        if self._in_a_row < FAILURES_IN_A_ROW:
            return False
        if now - self._open_until > FORGET_S:
            self._openings = 0
        open_s = min(
            OPEN_CAP_S, OPEN_S * 2.0 ** min(self._openings, 32) * (1 + JITTER * self._rng.random())
        )
        self._openings += 1
        self._open_until, self.why = now + open_s, why
        return True

    def facts(self, now: float) -> BreakerSeen:
        """Return what whoever looks at the router's health is told."""
        return BreakerSeen(self.state(now), self.why, round(self.opens_in(now), 3))
