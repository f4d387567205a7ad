"""Tokens of the engine as an answer's bytes: SSE events, or one JSON body. Pure.

A choice's state depends on the request and the token ids only, so a writer on another node
continues where this one stood.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvrelay.openai_api import sse
from kvrelay.openai_api.body import echoes_logprobs, prompt_only, requested_logprobs
from kvrelay.openai_api.logprobs import ScoredPrompt, chat_logprobs, completion_logprobs, joined
from kvrelay.openai_api.message_stream import MessageForm, MessageStream
from kvrelay.openai_api.prompt import Beginning
from kvrelay.openai_api.text_stream import TextStream
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    PromptLogprob,
    Usage,
)
from kvrelay.wire.errors import KvrelayError, RequestError
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

__all__ = ["AnswerWriter", "ChoiceWriter", "ChunkChoice"]

ChunkChoice = ChatChunkChoice | CompletionChunkChoice


class ChoiceWriter:
    """A choice of an answer. Call `tokens` for each update, `end` once, then `whole` if not
    streamed.

    After a replay it may be `stopped` (call `end`) or `ended` (call nothing).
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        tokenizer: Tokenizer,
        params: SamplingParams,
        index: int,
        message: MessageStream,
        so_far: ChoiceSoFar,
        beginning: Beginning,
    ) -> None:
        """Raises RequestError if log-probabilities of `so_far` are missing."""
        self.index = index
        self.token_ids: list[int] = []
        """With replayed ones, without those after a stop string."""
        self.ended = False
        self.scored_prompt: ScoredPrompt | None = None
        self._chat = isinstance(request, ChatRequest)
        self._streams = bool(request.stream)
        self._tokenizer = tokenizer
        self._stop_token_ids = params.stop_token_ids
        self._message = message
        self._beginning = beginning
        self._prompt_only = prompt_only(request)
        self._shows_logprobs = requested_logprobs(request) is not None
        self._echoed_logprobs = requested_logprobs(request) if echoes_logprobs(request) else None
        self._prompt_logprobs = request.prompt_logprobs
        self._shows_ids = bool(request.return_token_ids)
        self._as_token_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._offsets: list[int] = []
        self._text: list[str] = []  # of whole answers only
        self._finish_reason = ""
        self._stop_reason: int | str | None = None
        self._stream = TextStream(
            tokenizer,
            request.stop_strings,
            bool(request.include_stop_str_in_output),
            request.skip_special_tokens is not False,
            params.min_tokens,
            message.rendered,
        )
        self._begun = False
        self._unsent = ""  # released while replaying
        # Last tokens whose ids or log-probabilities the client lacks.
        self._untold = 0
        self._replay(so_far)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was hit: abort the request and call `end`."""
        return self._stream.stop_hit is not None

    @property
    def sent_text(self) -> int:
        """Return how many characters the client has."""
        return self._stream.sent - len(self._unsent)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def logprob(self) -> float:
        return sum(entry.logprob for entry in self._logprobs or ())

    def tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[ChunkChoice]:
        """Add tokens and return the chunks to send.

        Without tokens: what a replay left unsent. Tokens after a stop string are dropped.
        """
        text, self._unsent = self._unsent + self._take(token_ids, logprobs), ""
        if not self._streams:
            self._text.append(text)
            return []
        fresh, self._untold = self._untold, 0
        # Not before the first token: an error before it has a status.
        head = self._head() if self.token_ids else []
        return head + self._chunks(text, fresh)

    def end(self, finish: Finish) -> list[ChunkChoice]:
        """End the choice and return its last chunks."""
        assert not self.ended, "a choice ends once"
        text, self._unsent = self._unsent + self._stream.finish(), ""
        self.ended = True
        chunks: list[ChunkChoice] = []
        if self._streams:
            chunks = self._chunks(text, self._untold)
        else:
            self._text.append(text)
            if self._chat and self.text:
                self._message.push(self.text)
        if self._chat:
            chunks += [ChatChunkChoice(self.index, delta) for delta in self._message.finish()]
        self._finish_reason, self._stop_reason = self._reasons(finish)
        if not self._streams:
            return []
        last = chunks.pop() if chunks else self._chunk(Delta(), "", 0)
        reasons = {"finish_reason": self._finish_reason, "stop_reason": self._stop_reason}
        return [*self._head(), *chunks, replace(last, **reasons)]

    def whole(self) -> ChatChoice | CompletionChoice:
        """Return the ended choice."""
        rest = (
            self._finish_reason,
            self._stop_reason,
            self.token_ids if self._shows_ids else UNSET,
        )
        echo, prompt = self._beginning.echo, self._beginning.prompt_token_ids
        if self._chat:
            message = replace(self._message.message(), role=self._beginning.role)
            if echo:
                message = replace(message, content=echo + (message.content or ""))
            return ChatChoice(self.index, message, self._chat_logprobs(0), *rest)
        text = echo + self.text
        ids = UNSET if prompt is None else list(prompt)
        logprobs = joined(self._echo_logprobs(), self._completion_logprobs(0))
        return CompletionChoice(self.index, text, logprobs, *rest, ids, self.prompt_logprobs())

    def prompt_logprobs(self) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        if self._prompt_logprobs is None or self.scored_prompt is None:
            return UNSET
        return self.scored_prompt.listed(self._tokenizer, self._prompt_logprobs)

    def _replay(self, so_far: ChoiceSoFar) -> None:
        if self._logprobs is not None and len(so_far.logprobs) != len(so_far.generated):
            raise RequestError(
                f"log-probabilities of {len(so_far.logprobs)} of {len(so_far.generated)} generated "
                "tokens were handed over and the request asks for all; send the request again",
                param="kv_transfer_params",
            )
        text = self._take(so_far.generated, so_far.logprobs)
        if not self._streams:
            self._text.append(text)
        elif so_far.sent_text is None:
            self._unsent = text
        else:
            self._begun, self._untold = True, 0
            self._unsent = text[so_far.sent_text :]
            if self._chat and so_far.sent_text and text:
                self._message.push(text[: so_far.sent_text])  # said already
        if so_far.finish is not None:
            self.end(so_far.finish)

    def _take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        released = []
        for i, token in enumerate(token_ids):
            if self.stopped or self._prompt_only:
                break
            if self._logprobs is not None:
                self._offsets.append(len(self._beginning.echo) + self._stream.decoded)
                self._logprobs.append(logprobs[i])
            self._untold += self._shows_logprobs or self._shows_ids
            self.token_ids.append(token)
            released.append(self._stream.push(token))
        return "".join(released)

    def _head(self) -> list[ChunkChoice]:
        if self._begun:
            return []
        self._begun = True
        echo, prompt = self._beginning.echo, self._beginning.prompt_token_ids
        if not self._chat:
            ids = UNSET if prompt is None else list(prompt)
            logprobs = self._echo_logprobs()
            says = bool(echo or ids or logprobs)
            return (
                [CompletionChunkChoice(self.index, echo, logprobs, prompt_token_ids=ids)]
                if says
                else []
            )
        head: list[ChunkChoice] = [ChatChunkChoice(self.index, Delta(self._beginning.role, ""))]
        return [*head, ChatChunkChoice(self.index, Delta(content=echo))] if echo else head

    def _chunks(self, text: str, fresh: int) -> list[ChunkChoice]:
        if not (text or fresh):
            return []
        if not self._chat:
            return [self._chunk(Delta(), text, fresh)]
        deltas = (self._message.push(text) if text else []) or (
            [Delta(content="")] if fresh else []
        )
        return [self._chunk(delta, "", 0 if at else fresh) for at, delta in enumerate(deltas)]

    def _chunk(self, delta: Delta, text: str, fresh: int) -> ChunkChoice:
        start = len(self.token_ids) - fresh
        ids = self.token_ids[start:] if fresh and self._shows_ids else UNSET
        if self._chat:
            logprobs = self._chat_logprobs(start) if fresh else None
            return ChatChunkChoice(self.index, delta, logprobs, token_ids=ids)
        return CompletionChunkChoice(
            self.index, text, self._completion_logprobs(start) if fresh else None, token_ids=ids
        )

    def _reasons(self, finish: Finish) -> tuple[str, int | str | None]:
        if self._prompt_only:
            finish = Finish.LENGTH
        reason = Finish.STOP.value if self.stopped else finish.value
        named = self._message.finish_reason(reason) if self._chat else reason
        if self.stopped:
            return named, self._stream.stop_hit
        last = self.token_ids[-1] if self.token_ids else None
        return named, last if reason == Finish.STOP and last in self._stop_token_ids else None

    def _chat_logprobs(self, start: int) -> ChatLogprobs | None:
        if self._logprobs is None or not self._shows_logprobs:
            return None
        return chat_logprobs(
            self._tokenizer, self._logprobs[start:], as_token_ids=self._as_token_ids
        )

    def _echo_logprobs(self) -> CompletionLogprobs | None:
        if self._echoed_logprobs is None or self.scored_prompt is None:
            return None
        echo, as_ids = self._beginning.echo, self._as_token_ids
        return self.scored_prompt.echoed(
            self._tokenizer, self._echoed_logprobs, echo, as_token_ids=as_ids
        )

    def _completion_logprobs(self, start: int) -> CompletionLogprobs | None:
        if self._logprobs is None or not self._shows_logprobs:
            return None
        offsets = self._offsets[start:]
        return completion_logprobs(
            self._tokenizer, self._logprobs[start:], offsets, as_token_ids=self._as_token_ids
        )


_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    """An answer to one prompt. Call `tokens` and `end` for each choice, then `close`, or `error`."""

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
        message_form: MessageForm = MessageForm(),  # noqa: B008 - a constant
    ) -> None:
        """`so_far` was made elsewhere.

        A `part` of several prompts counts choices from `first_index`, and leaves a stream's end to
        sse.py. Raises RequestError for a `so_far` that cannot be continued.
        """
        self.streams = bool(request.stream)
        self._part = part
        self.cached_tokens = cached_tokens
        """Set with the first update."""
        self.choices = [
            ChoiceWriter(
                request,
                tokenizer,
                params,
                first_index + at,
                MessageStream(message_form, response_id, first_index + at),
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
        """Return the prompt's log-probabilities, set before the first token."""
        return self.choices[0].scored_prompt

    @scored_prompt.setter
    def scored_prompt(self, scored: ScoredPrompt) -> None:
        for choice in self.choices:
            choice.scored_prompt = scored

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    def tokens(
        self, choice: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> bytes:
        """Add new tokens of a choice and return the events to send now."""
        return self._events(self.choices[choice].tokens(token_ids, logprobs or ()))

    def end(self, choice: int, finish: Finish) -> bytes:
        """End a choice and return its last events."""
        return self._events(self.choices[choice].end(finish))

    def close(self, handover: KvTransferParams | None = None) -> bytes:
        """Return the end of the answer: usage and [DONE], or the whole JSON body.

        `handover` goes into a JSON body, for a proxy that carries it to the decode node.
        """
        if self.streams and self._part:
            return b""
        if self.streams:
            return (self._event(None) if self.include_usage else b"") + sse.DONE
        return _encode(self._whole(handover))

    def cut(self, handover: KvTransferParams | None = None) -> bytes:
        """End the choices that have begun, and the answer."""
        begun = [
            at for at, choice in enumerate(self.choices) if choice.token_ids and not choice.ended
        ]
        return b"".join([self.end(at, Finish.LENGTH) for at in begun]) + self.close(handover)

    def error(self, error: KvrelayError) -> bytes:
        """Return the end of an answer that broke: an event and [DONE], or the error's JSON body."""
        return sse.error_event(error) if self.streams else error.json()

    def _events(self, chunks: Sequence[ChunkChoice]) -> bytes:
        return b"".join([self._event(chunk) for chunk in chunks])

    def _event(self, choice: ChunkChoice | None) -> bytes:
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
        if len(self.choices) <= self._returned:
            return self.choices
        first = self.choices[0].index
        best = sorted(self.choices, key=lambda choice: -choice.logprob)[: self._returned]
        for at, choice in enumerate(best):
            choice.index = first + at
        return best

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of all choices, and of the prompt found in a prefix cache."""
        return (
            self.prompt_tokens,
            sum(len(choice.token_ids) for choice in self.choices),
            self.cached_tokens,
        )

    def _usage(self) -> Usage:
        return Usage.from_counts(*self.counts)
