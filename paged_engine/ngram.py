"""Proposes the next tokens of a text by looking its newest tokens up in itself. Pure; knows no
request and no model.

Prompt lookup decoding (Apoorv Saxena, "Prompt Lookup Decoding", 2023): where the last n tokens have
occurred before, what followed them then is likely to follow now. The longest n that has occurred is
taken, and its newest occurrence. An index from n-grams to places makes that O(1) per token, instead
of a search through the text per step.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NgramIndex"]

# A long prompt is indexed in several calls, so that no step of the engine waits longer than about a
# millisecond for it.
_INDEXED_PER_CALL = 2048


class NgramIndex:
    """Where each n-gram of one growing text has occurred last, for n from `shortest` to `longest`."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._follower: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> place of the token behind its newest occurrence
        self._indexed = 0  # so many first tokens are known as followers

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may come next; none if nothing is found. `tokens` may only have
        grown since.
        """
        self._take_in(tokens)
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            place = self._follower.get(tuple(tokens[-n:]))
            if place is not None:
                # What is proposed is copied from as well: a text that repeats itself every few
                # tokens goes on so.
                period = len(tokens) - place
                return [tokens[place + i % period] for i in range(count)]
        return []

    def _take_in(self, tokens: Sequence[int]) -> None:
        end = min(len(tokens), self._indexed + _INDEXED_PER_CALL)
        for place in range(self._indexed, end):
            for n in range(self._shortest, min(self._longest, place) + 1):
                self._follower[tuple(tokens[place - n : place])] = place
        self._indexed = end
