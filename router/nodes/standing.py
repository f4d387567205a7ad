"""What the router thinks of one node for one kind of leg: its breaker, what its last legs were like, and one leg's way
through it. Pure: `now` is an argument.

Legs of prefill and of decoding count apart, also where one node does both: a decode leg that computes its prompt itself
counts as the first kind until its first token, and as the second from then on, which its second one speaks for.
"""

from __future__ import annotations

import random

from router.nodes.breaker import Breaker
from router.nodes.outliers import Sample, Samples

__all__ = ["GAP_EVERY", "Passage", "Standing"]

_GAP_FRAMES = 8
"""A gap between tokens is a mean over so many, or nothing."""
GAP_EVERY = 128
"""A long answer is told of as it goes."""


class Standing:
    """Of one node and kind of leg."""

    def __init__(self, rng: random.Random) -> None:
        self.breaker = Breaker(rng)
        self.samples = Samples()


class Passage:
    """One leg on a node, as its standings see it. `close` in any case; only the first end counts."""

    def __init__(self, standing: Standing, then: Standing, now: float, *, waits_for_us: bool = True) -> None:
        """`standing` counts until the first token, `then` from there on. `waits_for_us`: how long the first frame takes
        says something of the node; else it waits for another one."""
        self.first_s: float | None = None
        """How long the first frame took."""
        self.heard_at = now
        """When the last frame came."""
        self.plain = False
        """Of a frame with tokens there is nothing to do but to set `heard_at` and to count it, up to GAP_EVERY."""
        self.gap_frames = 0
        self._standing, self._then = standing, then
        self._untold = [(standing, standing.breaker.begin(now))]
        """Whose breakers were told that it began, whether as a probe, and not yet how it is."""
        if then is not standing:
            self._untold.append((then, then.breaker.begin(now)))
        self._began = now
        self._tells = waits_for_us
        self._answered = self._closed = False
        self._gap_since: float | None = None

    @property
    def answered(self) -> bool:
        """Whether the node has told of tokens."""
        return self._answered

    def heard(self, now: float, *, tokens: bool) -> bool:
        """Frames came, with tokens or without; whether they are the leg's first tokens."""
        self.heard_at = now
        if self.first_s is None:
            self.first_s = now - self._began
            if self._tells:
                self._standing.samples.legs.append(Sample(now, first_s=self.first_s, ended=False))
        if not tokens:
            return False
        if self._gap_since is None:
            self._gap_since, self.gap_frames = now, 0
        else:
            self.gap_frames += 1
            if self.gap_frames >= GAP_EVERY:
                self._tell_gap(now)
        if self._untold:
            self._succeeded(now)
        self.plain = not self._untold
        first, self._answered = not self._answered, True
        return first

    def held_up(self) -> None:
        """The client has no room: the gaps of now are not the node's."""
        self._gap_since, self.plain = None, False

    def failed(self, why: str, now: float) -> bool:
        """The leg broke by the node's own fault; whether that has opened its breaker."""
        if self._closed:
            return False
        self._closed = True
        whose, probe = self._untold.pop(0) if self._untold else (self._then, False)
        whose.samples.legs.append(Sample(now, failed=True))
        self._drop()
        return whose.breaker.failed(now, why, probe=probe)

    def ended(self, now: float) -> None:
        """The leg has ended well."""
        if not self._closed:
            self._closed = True
            while self._untold:
                self._succeeded(now)
            if self._gap_since is not None and self.gap_frames >= _GAP_FRAMES:
                self._tell_gap(now, ended=True)
            else:
                self._then.samples.legs.append(Sample(now))

    def close(self) -> None:
        """If nothing was said of how it ended, nothing is known of the node: a refusal, or a client that went away."""
        if not self._closed:
            self._closed = True
            self._drop()

    def _succeeded(self, now: float) -> None:
        standing, probe = self._untold.pop(0)
        standing.breaker.succeeded(now, probe=probe)
        if standing is not self._then:
            standing.samples.legs.append(Sample(now))  # its part of the leg is over

    def _drop(self) -> None:
        for standing, probe in self._untold:
            standing.breaker.dropped(probe=probe)
        self._untold.clear()

    def _tell_gap(self, now: float, *, ended: bool = False) -> None:
        assert self._gap_since is not None
        gap_s = (self.heard_at - self._gap_since) / self.gap_frames
        self._then.samples.legs.append(Sample(now, ended=ended, gap_s=gap_s))
        self._gap_since, self.gap_frames = now, 0
