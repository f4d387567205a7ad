"""Which tokens may come next in one request: a grammar, allowed tokens, bad words. Pure: numpy and
no device.

A guide is a function of the request's parameters and of its output tokens, and holds no state
beyond them: it follows the tokens, wherever they were generated, so a hand-over, a fail-over and a
preemption carry nothing of it. The matcher is a grammar library's (paged_engine/grammar.py). Masks
are words of 32 tokens: bit i of word w is token 32 * w + i.

An answer ends with "stop" when its grammar has ended, and when no token is left that may come next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.wire.sampling import SamplingParams

__all__ = ["Guide", "Matcher", "RowMasks", "Words", "words_for"]

Words = npt.NDArray[np.uint32]


class Matcher(Protocol):
    """What is needed of llguidance's LLMatcher. Its methods raise nothing: an error is a state, and
    stays.
    """

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Go on by tokens; False if they do not match."""

    def is_stopped(self) -> bool:
        """Whether nothing can follow. Also true after an error."""

    def is_error(self) -> bool:
        """Whether a limit was hit, or a token was consumed that does not match."""

    def get_error(self) -> str:
        """Why."""

    def deep_copy(self) -> Any:
        """Another one in the same state."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Of the rows of a step that are masked: their numbers, ascending, and words [rows,
    words_for(vocabulary)].
    """

    rows: list[int]
    words: Words


def words_for(vocab_size: int) -> int:
    """How many words a row of a mask has."""
    return -(-vocab_size // 32)


class Guide:
    """Of one request; `follow` it before asking anything."""

    @classmethod
    def for_params(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        matcher: Matcher | None,
    ) -> Guide | None:
        """None if nothing is ruled out. `matcher`: that of `params.constraint`, which has consumed
        nothing yet.
        """
        assert (matcher is None) == (params.constraint is None), "a constraint needs its matcher"
        if matcher is None and params.allowed_token_ids is None and not params.bad_words:
            return None
        return cls(
            params,
            vocab_size,
            tuple(token for token in eos_token_ids if token < vocab_size),
            matcher,
        )

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        matcher: Matcher | None,
    ) -> None:
        self.matcher = matcher
        self.over = False
        """Whether the grammar has ended: nothing may follow."""
        self.exhausted = False
        """Whether no token may come next, although the grammar has not ended."""
        self.error: str | None = None
        """Why the grammar cannot be followed any further."""
        self._params, self._vocab, self._eos = params, vocab_size, eos_token_ids
        self._seen = 0  # output tokens that the matcher has consumed
        single = [word[0] for word in params.bad_words if len(word) == 1]
        self._bad: dict[
            int, list[tuple[list[int], int]]
        ] = {}  # by the last but one token: those before the last
        for *before, last in params.bad_words:
            if before:
                self._bad.setdefault(before[-1], []).append((before, last))
        base = (
            _all(vocab_size)
            if params.allowed_token_ids is None
            else _bits(params.allowed_token_ids, vocab_size)
        )
        self._base = base & ~_bits(single, vocab_size)
        self._ends = _bits((*eos_token_ids, *params.stop_token_ids), vocab_size)
        self._eos_bits = _bits(eos_token_ids, vocab_size)

    @property
    def spent(self) -> bool:
        """Whether no token can be chosen that may come next: the answer ends without one more."""
        return self.exhausted or self.error is not None

    def fork(self) -> Guide:
        """Another guide in the same state, for a choice that goes its own way."""
        other = object.__new__(Guide)
        other.__dict__.update(self.__dict__)
        other.matcher = None if self.matcher is None else self.matcher.deep_copy()
        return other

    def follow(self, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """These are all tokens so far, prompt and output."""
        if self.matcher is None or self.over or self.error is not None:
            return
        fresh = list(token_ids[prompt_tokens + self._seen :])
        self._seen += len(fresh)
        if fresh and not self.matcher.consume_tokens(fresh):
            self.error = "a token of the answer does not match its grammar"
        self.check()

    def check(self) -> None:
        """See what has become of the matcher: it may stop or fail also while a mask is computed."""
        if self.matcher is None or self.error is not None:
            return
        if self.matcher.is_error():
            why = (self.matcher.get_error().strip() or "no reason given").splitlines()[0]
            self.error = f"the grammar of this answer cannot be followed any further: {why}"
        else:
            self.over = self.matcher.is_stopped()

    def narrow(self, words: Words, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Take from `words`, which the matcher allows, what else is ruled out; notices if nothing
        is left.
        """
        words &= self._base
        outputs = len(token_ids) - prompt_tokens
        for before, last in self._bad.get(token_ids[-1], ()):
            if len(before) <= outputs and list(token_ids[len(token_ids) - len(before) :]) == before:
                words[last >> 5] &= ~np.uint32(1 << (last & 31))
        if self.matcher is not None and self._params.ignore_eos:
            words &= ~self._eos_bits  # it would end the grammar, and with it the answer
        left = words & ~self._ends if outputs < self._params.min_tokens else words
        self.exhausted = not left.any()


def _bits(tokens: Iterable[int], vocab_size: int) -> Words:
    flags = np.zeros(words_for(vocab_size) * 32, np.bool_)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<u4")


def _all(vocab_size: int) -> Words:
    return _bits(range(vocab_size), vocab_size)
