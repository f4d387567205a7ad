"""Log-probabilities in the two shapes of the OpenAI API. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from openai_api.tokenizer import Tokenizer
from openai_api.types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from wire.outputs import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs"]

_LOWEST = -9999.0
"""JSON has no infinity; the API's clients know this value for 'impossible'."""


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """One entry per token, with the asked number of most likely tokens."""
    content = []
    for entry in logprobs:
        chosen = _top(tokenizer, entry.token_id, entry.logprob)
        top = [_top(tokenizer, *pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Parallel lists; the chosen token is among the most likely even where it is not one of them."""
    tops = []
    for entry in logprobs:
        pairs = [(entry.token_id, entry.logprob), *zip(entry.top_ids, entry.top_logprobs, strict=True)]
        tops.append({tokenizer.token_text(token): _finite(value) for token, value in pairs})
    return CompletionLogprobs(
        text_offset=list(offsets),
        token_logprobs=[_finite(entry.logprob) for entry in logprobs],
        tokens=[tokenizer.token_text(entry.token_id) for entry in logprobs],
        top_logprobs=tops,
    )


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(tokenizer.token_text(token_id), _finite(logprob), list(tokenizer.token_bytes(token_id)))


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LOWEST else _LOWEST
