"""Turns an engine's tokens into the bytes of an answer: SSE events, or one JSON body. One class for
all roles. Pure.

Owns what surrounds the choices (openai_api/choice_writer.py): the head of every chunk, usage, the
end. The choices of an answer come interleaved, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvrelay.openai_api import sse
from kvrelay.openai_api.beginning import Beginning
from kvrelay.openai_api.choice_writer import ChoiceWriter, ChunkChoice
from kvrelay.openai_api.message import MessageParser, PlainMessage
from kvrelay.openai_api.scored_prompt import ScoredPrompt
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionRequest,
    Usage,
)
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

__all__ = ["AnswerWriter"]

_ROLE = "assistant"
_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    """One answer to one prompt. For each choice `tokens` for each update and then `end`; when all
    have ended, `close`.

    If it broke, `error`. `so_far` says of each choice what was made elsewhere.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        response_id: str,
        created: int,
        model: str,
        prompt_tokens: int,
        cached_tokens: int = 0,
        so_far: Sequence[ChoiceSoFar] = (ChoiceSoFar(),),
        part: bool = False,
        first_index: int = 0,
        beginning: Beginning = Beginning(),  # noqa: B008 - a constant
        message: Callable[[int], MessageParser] = lambda _: PlainMessage(_ROLE),
    ) -> None:
        """`message` makes the parser of the choice of an index. A `part` of a request with several
        prompts counts its choices from `first_index` and leaves the end of a stream to
        openai_api/join.py.

        Raises RequestError for a `so_far` that cannot be gone on from.
        """
        self.streams = bool(request.stream)
        self._part = part
        self.cached_tokens = cached_tokens
        """Of the prompt, those found in a prefix cache. Known when the first update comes; set it
        then.
        """
        self.choices = [
            ChoiceWriter(
                request,
                tokenizer,
                params,
                first_index + at,
                message(first_index + at),
                each,
                beginning,
            )
            for at, each in enumerate(so_far)
        ]
        self._chat = isinstance(request, ChatRequest)
        whole = "chat.completion" if self._chat else "text_completion"
        self._object = "chat.completion.chunk" if self._chat and self.streams else whole
        options = request.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self._usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        self._returned = request.n or 1  # of the choices
        self._prompt_token_ids: list[int] | UnsetType = UNSET
        if beginning.prompt_token_ids is not None:
            self._prompt_token_ids = list(beginning.prompt_token_ids)
        self.response_id, self.created, self.model = response_id, created, model
        self.prompt_tokens = prompt_tokens

    @property
    def scored_prompt(self) -> ScoredPrompt | None:
        """Of a request that asks for log-probabilities of its prompt; set it before the first
        token.
        """
        return self.choices[0].scored_prompt

    @scored_prompt.setter
    def scored_prompt(self, scored: ScoredPrompt) -> None:
        for choice in self.choices:
            choice.scored_prompt = scored

    @property
    def ended(self) -> bool:
        """All choices have ended."""
        return all(choice.ended for choice in self.choices)

    def tokens(
        self, choice: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> bytes:
        """Take new tokens of a choice; the events to send now. See ChoiceWriter.tokens."""
        return self._events(self.choices[choice].tokens(token_ids, logprobs or ()))

    def end(self, choice: int, finish: Finish) -> bytes:
        """The end of one choice: its last events."""
        return self._events(self.choices[choice].end(finish))

    def close(self, handover: KvTransferParams | None = None) -> bytes:
        """Behind the end of all choices: usage and [DONE], or the whole JSON body.

        `handover` goes into the body (not into streams) for a proxy that carries it to the decode
        node.
        """
        if self.streams and self._part:
            return b""
        if self.streams:
            return (self._event(None) if self.include_usage else b"") + sse.DONE
        return _encode(self._whole(handover))

    def cut(self, handover: KvTransferParams | None = None) -> bytes:
        """The end of an answer that is given to a caller as it is now: the choices that have begun."""
        begun = [
            at for at, choice in enumerate(self.choices) if choice.token_ids and not choice.ended
        ]
        return b"".join([self.end(at, Finish.LENGTH) for at in begun]) + self.close(handover)

    def error(self, error: KvrelayError) -> bytes:
        """The end of an answer that broke: an event and [DONE], or the JSON body of the error."""
        return sse.error_event(error) if self.streams else error.json()

    def _events(self, chunks: Sequence[ChunkChoice]) -> bytes:
        return b"".join([self._event(chunk) for chunk in chunks])

    def _event(self, choice: ChunkChoice | None) -> bytes:
        """One chunk; without a choice it is the usage chunk."""
        usage = self._usage() if choice is None or self._usage_in_chunks else UNSET
        head = (self.response_id, self._object, self.created, self.model)
        if isinstance(choice, CompletionChunkChoice):
            return sse.event(_encode(CompletionChunk(*head, [choice], usage)))
        if choice is None:
            return sse.event(_encode(ChatChunk(*head, [], usage)))
        ids = self._prompt_token_ids if choice.delta.role is not None else UNSET
        return sse.event(_encode(ChatChunk(*head, [choice], usage, ids)))

    def _whole(self, handover: KvTransferParams | None) -> ChatCompletion | Completion:
        head = (self.response_id, self._object, self.created, self.model)
        ended = [choice.whole() for choice in self._best() if choice.ended]
        carried = UNSET if handover is None else handover
        if self._chat:
            chats = [choice for choice in ended if isinstance(choice, ChatChoice)]
            scored = self.choices[0].prompt_logprobs()
            return ChatCompletion(
                *head, chats, self._usage(), carried, self._prompt_token_ids, scored
            )
        texts = [choice for choice in ended if isinstance(choice, CompletionChoice)]
        return Completion(*head, texts, self._usage(), carried)

    def _best(self) -> Sequence[ChoiceWriter]:
        """The choices to return: if there are more than were asked for, the likeliest, in that
        order.
        """
        if len(self.choices) <= self._returned:
            return self.choices
        first = self.choices[0].index
        best = sorted(self.choices, key=lambda choice: -choice.logprob)[: self._returned]
        for at, choice in enumerate(best):
            choice.index = first + at
        return best

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompt, generated ones of all choices, and those of the prompt found in a
        prefix cache.
        """
        return (
            self.prompt_tokens,
            sum(len(choice.token_ids) for choice in self.choices),
            self.cached_tokens,
        )

    def _usage(self) -> Usage:
        return Usage.of(*self.counts)
