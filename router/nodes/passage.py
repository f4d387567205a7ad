"""One leg's way through the breakers of its node. Pure: `now` is an argument.

Legs of prefill and of decoding count apart, also where one node does both: a decode leg that computes its prompt itself
counts as the first kind until its first token, and as the second from then on, which its second one speaks for.
"""

from __future__ import annotations

from router.nodes.breaker import Breaker

__all__ = ["Passage"]


class Passage:
    """A leg on a node, as its breakers see it. `close` in any case; only the first end counts."""

    def __init__(self, first: Breaker, then: Breaker, now: float) -> None:
        """Begin a leg that speaks to `first` until its first token, and to `then` from there on."""
        self.first_s: float | None = None
        """How long the first frame took."""
        self.heard_at = now
        """When the last frame came."""
        self.answered = False
        """Whether the node has told of tokens."""
        self.plain = False
        """Whether a frame with tokens says nothing new but that it came: it is asked of every token."""
        self._then = then
        self._untold = [(first, first.begin(now))]
        """Breakers that were told that it began, whether as a probe, and not yet how it is."""
        if then is not first:
            self._untold.append((then, then.begin(now)))
        self._began = now
        self._closed = False

    def heard(self, now: float, *, tokens: bool) -> bool:
        """Note that frames came, with tokens or without. Returns whether they are the leg's first tokens."""
        self.heard_at = now
        if self.first_s is None:
            self.first_s = now - self._began
        if not tokens:
            return False
        if self._untold:
            self._succeeded(now)
        first, self.answered = not self.answered, True
        self.plain = not self._untold
        return first

    def failed(self, why: str, now: float) -> bool:
        """Note that it broke by the node's own fault. Returns whether that has opened a breaker."""
        if self._closed:
            return False
        self._closed = True
        whose, probe = self._untold.pop(0) if self._untold else (self._then, False)
        self._drop()
        return whose.failed(now, why, probe=probe)

    def ended(self, now: float) -> None:
        """Note that it has ended well."""
        if not self._closed:
            self._closed = True
            while self._untold:
                self._succeeded(now)

    def close(self) -> None:
        """End it without a word on the node, if none was said: a refusal, or a client that went away."""
        if not self._closed:
            self._closed = True
            self._drop()

    def _succeeded(self, now: float) -> None:
        breaker, probe = self._untold.pop(0)
        breaker.succeeded(now, probe=probe)

    def _drop(self) -> None:
        for breaker, probe in self._untold:
            breaker.dropped(probe=probe)
        self._untold.clear()
