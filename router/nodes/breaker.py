"""Whether one node may be sent legs of one kind: a breaker, and how long the node has asked to be left alone. Pure:
`now` is an argument, all randomness comes from `rng`.

Closed until FAILURES_IN_A_ROW, or half of at least WINDOW_LEGS legs within WINDOW_S, have failed; then open for a time
that doubles with each opening; then half-open: at most PROBES real requests at once go through, SUCCESSES of them close
it and one failure opens it again. Only a
node's own faults are told here, by whoever has sent the leg: never a 4xx, a refusal, or a client that went away.

Prior art: Nygard, Release It! (2007).
"""

from __future__ import annotations

import enum
import random
from collections import deque

import msgspec

__all__ = ["FAILURES_IN_A_ROW", "OPEN_CAP_S", "PROBES", "SUCCESSES", "WINDOW_LEGS", "Breaker", "BreakerSeen", "State"]

FAILURES_IN_A_ROW = 5
WINDOW_S = 30.0
WINDOW_LEGS = 20
WINDOW_SHARE = 0.5
OPEN_S, OPEN_CAP_S = 1.0, 60.0
JITTER = 0.2
"""An opening lasts up to this share longer, so that several routers do not probe at one moment."""
PROBES = 2
SUCCESSES = 2
FORGET_S = 60.0
"""Closed for so long, and longer than it was open last: the next opening is the first again."""


class State(enum.StrEnum):
    """CLOSED lets legs through, OPEN none, HALF_OPEN some as probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerSeen(msgspec.Struct, frozen=True):
    """A breaker as others are told of it."""

    state: str
    reason: str = ""
    opens_in_s: float = 0.0


class Breaker:
    """Of one node and kind of leg. Seconds are those of any one monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self.why = ""
        """Of the last opening."""
        self._rng = rng
        self._state = State.CLOSED
        self._in_a_row = 0
        self._window: deque[tuple[float, bool]] = deque(maxlen=512)  # when, and whether it failed
        self._failed = 0  # of the window
        self._openings = 0  # in a row
        self._open_until = 0.0
        self._open_s = 0.0
        self._closed_at = float("-inf")
        self._probing = 0
        self._probed = 0
        self._resting_until = float("-inf")

    def state(self, now: float) -> State:
        """Half-open as soon as the time of an opening is over."""
        if self._state is State.OPEN and now >= self._open_until:
            self._state, self._probed = State.HALF_OPEN, 0
        return self._state

    def lets_through(self, now: float) -> bool:
        """Whether a leg may go to the node, as a probe or otherwise."""
        state = self.state(now)
        return state is State.CLOSED or (state is State.HALF_OPEN and self._probing < PROBES)

    def might_probe(self, now: float) -> bool:
        """Whether one leg may go there though it is open, because there is no other node: one at a time."""
        return self.lets_through(now) or not self._probing

    def rests(self, now: float) -> bool:
        """The node has asked not to be asked for a while."""
        return now < self._resting_until

    def rest(self, seconds: float, now: float) -> None:
        """The node has said that it has no room for so long."""
        self._resting_until = max(self._resting_until, now + seconds)

    def opens_in(self, now: float) -> float:
        """Seconds until a leg might be let through."""
        open_s = self._open_until - now if self.state(now) is State.OPEN else 0.0
        return max(0.0, open_s, self._resting_until - now)

    def begin(self, now: float) -> bool:
        """A leg goes there; whether it is a probe. Exactly one of `succeeded`, `failed`, `dropped` follows a probe."""
        probe = self.state(now) is not State.CLOSED
        self._probing += probe
        return probe

    def succeeded(self, now: float, *, probe: bool) -> None:
        """A leg has told of tokens."""
        self._probing -= probe
        state = self.state(now)
        if state is State.CLOSED:
            self._in_a_row = 0
            self._note(now, failed=False)
        elif probe:
            if state is State.OPEN:  # asked before its time, because there was no other
                self._state, self._probed = State.HALF_OPEN, 0
            self._probed += 1
            if self._probed >= SUCCESSES:
                self._close(now)

    def failed(self, now: float, why: str, *, probe: bool) -> bool:
        """A leg broke by the node's own fault; whether that opens the breaker."""
        self._probing -= probe
        state = self.state(now)
        if state is State.HALF_OPEN and probe:
            self._open(now, why)
            return True
        if state is not State.CLOSED:
            return False  # it was sent before the opening, or before its time
        self._in_a_row += 1
        self._note(now, failed=True)
        legs = len(self._window)
        if self._in_a_row < FAILURES_IN_A_ROW and (legs < WINDOW_LEGS or self._failed < WINDOW_SHARE * legs):
            return False
        self._open(now, why)
        return True

    def dropped(self, *, probe: bool) -> None:
        """A leg ended in a way that says nothing of the node."""
        self._probing -= probe

    def facts(self, now: float) -> BreakerSeen:
        """Return what whoever looks at the router's health is told."""
        return BreakerSeen(self.state(now), self.why, round(self.opens_in(now), 3))

    def check(self) -> None:
        """Assert the invariants."""
        assert self._probing >= 0
        assert self._failed == sum(failed for _, failed in self._window)
        assert 0.0 <= self._open_s <= OPEN_CAP_S

    def _note(self, now: float, *, failed: bool) -> None:
        if len(self._window) == self._window.maxlen:
            self._failed -= self._window.popleft()[1]
        self._window.append((now, failed))
        self._failed += failed
        while self._window[0][0] <= now - WINDOW_S:
            self._failed -= self._window.popleft()[1]

    def _open(self, now: float, why: str) -> None:
        if self._state is State.CLOSED and now - self._closed_at > max(FORGET_S, self._open_s):
            self._openings = 0
        self._open_s = min(OPEN_CAP_S, OPEN_S * 2.0 ** min(self._openings, 32) * (1 + JITTER * self._rng.random()))
        self._openings += 1
        self._state, self._open_until, self.why = State.OPEN, now + self._open_s, why

    def _close(self, now: float) -> None:
        self._state, self._closed_at, self.why = State.CLOSED, now, ""
        self._in_a_row = self._failed = 0
        self._window.clear()
