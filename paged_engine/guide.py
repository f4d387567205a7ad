"""Tokens that may come next in a request: a grammar, allowed tokens, bad words. Pure numpy.

A guide is a function of parameters and output tokens, so a hand-over carries nothing of it. Bit i
of a mask's word w is token 32 * w + i.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from kvrelay.paged_engine.grammar import TimedMatcher

__all__ = ["Guide", "RowMasks", "Words", "first_line", "words_for"]

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class RowMasks:
    """A set of masks: ascending rows, and words [rows, words_for(vocab)]."""

    rows: list[int]
    words: Words


def first_line(text: str) -> str:
    return (text.strip() or "no reason given").splitlines()[0]


def words_for(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class Guide:
    """A guide of one request; call `follow` before anything else."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        matcher: TimedMatcher | None = None,
    ) -> None:
        """`matcher` is the constraint's, unused."""
        assert (matcher is None) == (params.constraint is None), "a constraint needs its matcher"
        self.matcher = matcher
        self.over = False
        self.exhausted = False
        """No token may come next, but the grammar has not ended."""
        self.error: str | None = None
        self._params, self._seen = params, 0
        eos = [token for token in eos_token_ids if token < vocab_size]
        single = [word[0] for word in params.bad_words if len(word) == 1]
        # By the last but one token: the tokens up to it, and the last one.
        self._bad: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in params.bad_words:
            if before:
                self._bad.setdefault(before[-1], []).append((before, last))
        allowed = params.allowed_token_ids
        base = _bits(range(vocab_size) if allowed is None else allowed, vocab_size)
        self._base = base & ~_bits(single, vocab_size)
        self._ends = _bits((*eos, *params.stop_token_ids), vocab_size)
        self._eos_bits = _bits(eos, vocab_size)

    @property
    def spent(self) -> bool:
        return self.exhausted or self.error is not None

    def follow(self, token_ids: Sequence[int], prompt_tokens: int) -> None:
        if self.matcher is None or self.over or self.error is not None:
            return
        fresh = list(token_ids[prompt_tokens + self._seen :])
        self._seen += len(fresh)
        if fresh and not self.matcher.consume_tokens(fresh):
            self.error = "a token of the answer does not match its grammar"
        self.check()

    def check(self) -> None:
        if self.matcher is None or self.error is not None:
            return
        if self.matcher.is_error():
            why = first_line(self.matcher.get_error())
            self.error = f"the grammar of this answer cannot be followed any further: {why}"
        else:
            self.over = self.matcher.is_stopped()

    def narrow(self, words: Words, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Clear what else is ruled out in the matcher's `words`; set `exhausted`."""
        words &= self._base
        outputs = len(token_ids) - prompt_tokens
        for before, last in self._bad.get(token_ids[-1], ()):
            if len(before) <= outputs and list(token_ids[len(token_ids) - len(before) :]) == before:
                words[last >> 5] &= ~np.uint32(1 << (last & 31))
        if self.matcher is not None and self._params.ignore_eos:
            words &= ~self._eos_bits
        left = words & ~self._ends if outputs < self._params.min_tokens else words
        self.exhausted = not left.any()


def _bits(tokens: Iterable[int], vocab_size: int) -> Words:
    flags = np.zeros(words_for(vocab_size) * 32, np.bool_)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<u4")
