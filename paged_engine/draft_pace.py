"""How many tokens a request may propose next, by what became of those that it has proposed. Pure.

A proposal that does not come true has cost a row of a step and, on a GPU, a step that could not be
planned ahead. So the length follows what came true. After three drafts in a row of which nothing
did a request waits, twice as long each time; so a text that never repeats itself costs next to
nothing. Which tokens are drawn depends on none of that.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DraftPace"]

_LONGEST_WAIT = 64  # tokens
# Where 7 of 10 proposed tokens come true, one draft in 37 is the third in a row to fail at once.
_MISSES = 3


@dataclass(slots=True)
class DraftPace:
    """Of one request. Token counts are those of its output."""

    reach: int
    """So many proposals are worth their rows."""
    _misses: int = 0
    _again_at: int = 0

    def allowed(self, output_tokens: int) -> int:
        """How many tokens may be proposed behind so many."""
        return self.reach if output_tokens >= self._again_at else 0

    def note(self, proposed: int, agreed: int, output_tokens: int, longest: int) -> None:
        """Of a draft behind `output_tokens` tokens, the first `agreed` came true."""
        if agreed:
            self.reach = (
                min(longest, self.reach + 1)
                if agreed == proposed
                else max(agreed + 1, self.reach - 1)
            )
            self._misses = 0
            return
        self.reach = max(1, self.reach // 2)
        self._misses += 1
        if self._misses >= _MISSES:
            self._again_at = output_tokens + min(2 ** (self._misses - _MISSES + 1), _LONGEST_WAIT)
