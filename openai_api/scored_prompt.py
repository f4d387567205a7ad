"""What an answer says of its prompt's own tokens: log-probabilities in vLLM's shape, or in an echo.
Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvrelay.openai_api.logprobs import completion_logprobs, finite
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import CompletionLogprobs, PromptLogprob
from kvrelay.wire.errors import RequestError
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["ScoredPrompt"]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt's tokens, and of all but the first their log-probabilities, with as many likely ones
    as anybody wants.

    Raises RequestError if there are more or fewer than that.
    """

    token_ids: Sequence[int]
    entries: Sequence[TokenLogprobs]

    def __post_init__(self) -> None:
        if len(self.entries) != len(self.token_ids) - 1:
            raise RequestError(
                f"log-probabilities of {len(self.entries)} tokens of the prompt were handed over, "
                f"and it has "
                f"{len(self.token_ids)}; pass on what the prefill node answered",
                param="kv_transfer_params",
            )

    def listed(self, tokenizer: Tokenizer, count: int) -> list[dict[str, PromptLogprob] | None]:
        """For each token itself and the `count` likeliest ones by id; of the first nothing is
        known.
        """

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
        """The lists of a completion that begins with the prompt, whose text is `echo`."""
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
        """Where in `echo` each token's text begins.

        The tokens may say more than the text: what the tokenizer puts before it, or special tokens,
        which a prompt of token ids shows no text of.
        """
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
