"""Log-probabilities in the shapes of OpenAI and vLLM. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from kvrelay.wire.errors import RequestError
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["ScoredPrompt", "chat_logprobs", "completion_logprobs", "finite", "joined"]

# JSON has no infinity; clients of the API know this value for impossible tokens.
_LOWEST = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], *, as_token_ids: bool = False
) -> ChatLogprobs:
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
    """Return parallel lists; the chosen token is among the likeliest."""
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
    """Return the lists of two consecutive texts as one."""
    if first is None or then is None:
        return first or then
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )


def _name(tokenizer: Tokenizer, token_id: int, as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids else tokenizer.token_text(token_id)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float, as_token_ids: bool) -> TopLogprob:
    return TopLogprob(
        _name(tokenizer, token_id, as_token_ids),
        finite(logprob),
        list(tokenizer.token_bytes(token_id)),
    )


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

    def listed(self, tokenizer: Tokenizer, count: int) -> list[dict[str, PromptLogprob] | None]:
        """Return each token with the `count` likeliest by id; None for the first."""

        def named(token: int, logprob: float, rank: int) -> PromptLogprob:
            return PromptLogprob(finite(logprob), rank, tokenizer.token_text(token))

        listed: list[dict[str, PromptLogprob] | None] = [None]
        for entry in self.entries:
            of_token = {str(entry.token_id): named(entry.token_id, entry.logprob, entry.rank)}
            likeliest = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
            for rank, (token, logprob) in enumerate(likeliest, 1):
                of_token.setdefault(str(token), named(token, logprob, rank))
            listed.append(of_token)
        return listed

    def echoed(
        self, tokenizer: Tokenizer, count: int, echo: str, *, as_token_ids: bool = False
    ) -> CompletionLogprobs:
        """Return the lists of a completion that begins with the prompt's text `echo`."""
        first = TokenLogprobs(self.token_ids[0], 0.0)
        cut = [
            replace(e, top_ids=e.top_ids[:count], top_logprobs=e.top_logprobs[:count])
            for e in self.entries
        ]
        offsets = self._offsets(tokenizer, echo)
        lists = completion_logprobs(tokenizer, [first, *cut], offsets, as_token_ids=as_token_ids)
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
