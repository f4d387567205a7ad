"""Log-probabilities in the shapes of OpenAI and vLLM. Pure."""

from __future__ import annotations

import codecs
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import astuple, replace

from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import CompletionLogprobs, TokenLogprob
from kvrelay.wire.errors import RequestError
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["ScoredPrompt", "chat_logprobs", "completion_logprobs", "finite", "joined"]

# JSON has no infinity; clients of the API know this value for impossible tokens.
_LOWEST = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]
) -> dict[str, list[TokenLogprob]]:
    def told(token_id: int, logprob: float) -> TokenLogprob:
        raw = list(tokenizer.token_bytes(token_id))
        return TokenLogprob(tokenizer.token_text(token_id), finite(logprob), raw)

    content = []
    for entry in logprobs:
        top = [told(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append(replace(told(entry.token_id, entry.logprob), top_logprobs=top))
    return {"content": content}


def completion_logprobs(
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprobs],
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """Return parallel lists; the chosen token is among the likeliest."""
    tops: list[dict[str, float] | None] = []
    for entry in logprobs:
        pairs = [
            (entry.token_id, entry.logprob),
            *zip(entry.top_ids, entry.top_logprobs, strict=True),
        ]
        tops.append({tokenizer.token_text(token): finite(value) for token, value in pairs})
    return CompletionLogprobs(
        text_offset=list(offsets),
        token_logprobs=[finite(entry.logprob) for entry in logprobs],
        tokens=[tokenizer.token_text(entry.token_id) for entry in logprobs],
        top_logprobs=tops,
    )


def joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(*map(operator.add, astuple(first), astuple(then)))


def finite(logprob: float) -> float:
    return logprob if logprob >= _LOWEST else _LOWEST


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt's tokens, and log-probabilities of all but the first. Raises RequestError."""

    token_ids: Sequence[int]
    entries: Sequence[TokenLogprobs]

    def __post_init__(self) -> None:
        if len(self.entries) != len(self.token_ids) - 1:
            raise RequestError(
                f"log-probabilities of {len(self.entries)} tokens of the prompt were handed over, "
                f"and it has {len(self.token_ids)}; pass on what the prefill node answered",
                param="kv_transfer_params",
            )

    def echoed(self, tokenizer: Tokenizer, count: int, echo: str) -> CompletionLogprobs:
        """Return the lists of a completion that begins with the prompt's text `echo`."""
        first = TokenLogprobs(self.token_ids[0], 0.0)
        cut = [
            replace(e, top_ids=e.top_ids[:count], top_logprobs=e.top_logprobs[:count])
            for e in self.entries
        ]
        offsets = self._offsets(tokenizer, echo)
        lists = completion_logprobs(tokenizer, [first, *cut], offsets)
        return replace(
            lists,
            token_logprobs=[None, *lists.token_logprobs[1:]],
            top_logprobs=[None, *lists.top_logprobs[1:]],
        )

    def _offsets(self, tokenizer: Tokenizer, echo: str) -> list[int]:
        # Tokens may say more than the text: what the tokenizer puts before it, or special tokens,
        # which a prompt of token ids shows no text of.
        for skipped in (frozenset(), tokenizer.special_ids):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text, begins = "", []
            for token in self.token_ids:
                begins.append(len(text))
                text += "" if token in skipped else decoder.decode(tokenizer.token_bytes(token))
            text += decoder.decode(b"", final=True)
            if text.endswith(echo):
                break
        before = max(0, len(text) - len(echo))
        return [min(len(echo), max(0, begin - before)) for begin in begins]
