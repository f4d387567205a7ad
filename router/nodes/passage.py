"""One leg's way through the breakers of its node. Pure: `now` is an argument.

Prefill and decode requests count apart, also where one node does both: a decode leg that
computes its prompt itself counts as the first kind until its first token, and as the second from
then on, which its second one speaks for.
"""

from __future__ import annotations

from kvrelay.router.nodes.breaker import Breaker

__all__ = ["Passage"]


class Passage:
    """A leg on a node, as its breakers see it. `close` in any case."""

    def __init__(self, first: Breaker, then: Breaker, now: float) -> None:
        """Begin a leg that speaks to `first` until its first token, and to `then` from there on."""
        self.first_s: float | None = None
        """How long the first frame took."""
        self.heard_at = now
        """When the last frame came."""
        self.answered = False
        """Whether the node has told of tokens."""
        self.plain = False
        """Whether a frame with tokens says nothing new but that it came: it is asked of every
        token.
        """
        self._first, self._then = first, then
        first.enter(self, now)
        then.enter(self, now)
        self._began = now

    def heard(self, now: float, *, tokens: bool) -> bool:
        """Note that frames came, with tokens or without. Returns whether they are the leg's first
        tokens.
        """
        self.heard_at = now
        if self.first_s is None:
            self.first_s = now - self._began
        if not tokens:
            return False
        (self._then if self.answered else self._first).answered(self, now)
        self.plain, self.answered = self.answered, True
        return not self.plain

    def failed(self, why: str, now: float) -> bool:
        """Note that it broke by the node's own fault. Returns whether that has opened a breaker."""
        opened = (self._then if self.answered else self._first).failed(self, why, now)
        self.close()
        return opened

    def ended(self, now: float) -> None:
        """Note that it has ended well."""
        self._first.succeeded(self, now)
        self._then.succeeded(self, now)

    def close(self) -> None:
        """End it without a word on the node, if none was said: a refusal, or a client that went
        away.
        """
        self._first.leave(self)
        self._then.leave(self)
