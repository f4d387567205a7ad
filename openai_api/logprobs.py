"""Log-probabilities in the two shapes of the OpenAI API. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs", "finite", "joined"]

_LOWEST = -9999.0
"""JSON has no infinity; the API's clients know this value for 'impossible'."""


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], *, as_token_ids: bool = False
) -> ChatLogprobs:
    """One entry per token, with the asked number of most likely tokens. `as_token_ids`: see
    `_name`.
    """
    content = []
    for entry in logprobs:
        chosen = _top(tokenizer, entry.token_id, entry.logprob, as_token_ids)
        top = [
            _top(tokenizer, *pair, as_token_ids)
            for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    *,
    as_token_ids: bool = False,
) -> CompletionLogprobs:
    """Parallel lists; the chosen token is among the most likely even where it is not one of them."""
    tops: list[dict[str, float] | None] = []
    for entry in logprobs:
        pairs = [
            (entry.token_id, entry.logprob),
            *zip(entry.top_ids, entry.top_logprobs, strict=True),
        ]
        tops.append(
            {_name(tokenizer, token, as_token_ids): finite(value) for token, value in pairs}
        )
    return CompletionLogprobs(
        text_offset=list(offsets),
        token_logprobs=[finite(entry.logprob) for entry in logprobs],
        tokens=[_name(tokenizer, entry.token_id, as_token_ids) for entry in logprobs],
        top_logprobs=tops,
    )


def joined(
    first: CompletionLogprobs | None, then: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    """The lists of two parts of a text, one behind the other."""
    if first is None or then is None:
        return first or then
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )


def _name(tokenizer: Tokenizer, token_id: int, as_token_ids: bool) -> str:
    """A token's text, which several tokens may share, or `token_id:` and its id, which none does."""
    return f"token_id:{token_id}" if as_token_ids else tokenizer.token_text(token_id)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float, as_token_ids: bool) -> TopLogprob:
    return TopLogprob(
        _name(tokenizer, token_id, as_token_ids),
        finite(logprob),
        list(tokenizer.token_bytes(token_id)),
    )


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return logprob if logprob >= _LOWEST else _LOWEST
