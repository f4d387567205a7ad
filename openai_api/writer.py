"""Tokens of the engine as an answer's bytes: SSE events, or one JSON body. Pure.

A choice's state depends on the request and the token ids only, so a writer on another node
continues where this one stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvrelay.openai_api import sse
from kvrelay.openai_api.body import prompt_only
from kvrelay.openai_api.logprobs import chat_logprobs, completion_logprobs, joined
from kvrelay.openai_api.message_stream import MessageForm, MessageStream
from kvrelay.openai_api.prompt import Beginning
from kvrelay.openai_api.tokenizer import TextStream, Tokenizer
from kvrelay.openai_api.types import (
    Answer,
    AnyRequest,
    ChatRequest,
    Choice,
    CompletionLogprobs,
    Delta,
    Usage,
)
from kvrelay.wire.errors import KvrelayError, RequestError
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

__all__ = ["AnswerWriter", "ChoiceWriter"]


class ChoiceWriter:
    """A choice of an answer. Call `tokens` for each update, `end` once, then `whole` if not
    streamed.

    After a replay it may be `stopped` (call `end`) or `ended` (call nothing).
    """

    def __init__(
        self,
        request: AnyRequest,
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
        self._chat = isinstance(request, ChatRequest)
        self._streams = bool(request.stream)
        self._tokenizer = tokenizer
        self._stop_token_ids = params.stop_token_ids
        self.message = message
        self._beginning = beginning
        self._prompt_only = prompt_only(request)
        self._echoed_logprobs = request.echoed_logprobs
        self._shows_ids = bool(request.return_token_ids)
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._offsets: list[int] = []
        self._reasons: dict[str, Any] = {}
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
        # Last tokens whose ids or log-probabilities the client of a stream lacks.
        self._untold = 0
        self._replay(so_far)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was hit: abort the request and call `end`."""
        return self._stream.stop_hit is not None

    @property
    def sent_text(self) -> int:
        return self._stream.sent - len(self._unsent)

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Choice]:
        """Add tokens and return the chunks to send; without tokens what a replay left unsent."""
        text, self._unsent = self._unsent + self._take(token_ids, logprobs), ""
        if not self._streams:
            self.message.push(text)
            return []
        fresh, self._untold = self._untold, 0
        # Not before the first token: an error before it has a status.
        head = self._head() if self.token_ids else []
        return head + self._chunks(text, fresh)

    def end(self, finish: Finish) -> list[Choice]:
        assert not self.ended, "a choice ends once"
        text, self._unsent = self._unsent + self._stream.finish(), ""
        self.ended = True
        chunks = self._chunks(text, self._untold)
        chunks += [Choice(self.index, delta=delta) for delta in self.message.finish()]
        self._reasons = self._reasons_of(finish)
        if not self._streams:
            return []
        nothing: dict[str, Any] = {"delta": Delta()} if self._chat else {"text": ""}
        last = chunks.pop() if chunks else Choice(self.index, **nothing)
        return [*self._head(), *chunks, replace(last, **self._reasons)]

    def whole(self) -> Choice:
        begins = self._beginning
        message = self.message.message(begins.role)
        said: dict[str, Any] = {"message": message}
        logprobs = self._logprobs_from(0)
        if not self._chat:
            text = f"{begins.echo}{message['content']}"
            said = {"text": text, "prompt_token_ids": begins.prompt_token_ids}
            echoed = self._echo_logprobs()
            logprobs = joined(echoed, logprobs) if echoed else logprobs
        ids = self.token_ids if self._shows_ids else UNSET
        return Choice(self.index, **said, **self._reasons, logprobs=logprobs, token_ids=ids)

    def _replay(self, so_far: ChoiceSoFar) -> None:
        if self._logprobs is not None and len(so_far.logprobs) != len(so_far.generated):
            raise RequestError(
                f"log-probabilities of {len(so_far.logprobs)} of {len(so_far.generated)} generated "
                "tokens were handed over and the request asks for all; send the request again",
                param="kv_transfer_params",
            )
        text = self._take(so_far.generated, so_far.logprobs)
        sent = so_far.sent_text if self._streams else len(text)
        if sent is not None:
            self._begun, self._untold = True, 0
            self.message.push(text[:sent])
        self._unsent = text[sent or 0 :]
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
            self._untold += self._streams and (self._logprobs is not None or self._shows_ids)
            self.token_ids.append(token)
            released.append(self._stream.push(token))
        return "".join(released)

    def _head(self) -> list[Choice]:
        if self._begun:
            return []
        self._begun = True
        if self._chat:
            return [Choice(self.index, delta=Delta(self._beginning.role, ""))]
        ids, echo = self._beginning.prompt_token_ids, self._beginning.echo
        logprobs = self._echo_logprobs()
        if not (echo or ids or logprobs):
            return []
        return [Choice(self.index, text=echo, logprobs=logprobs, prompt_token_ids=ids)]

    def _chunks(self, text: str, fresh: int) -> list[Choice]:
        if not (text or fresh):
            return []
        deltas = self.message.push(text) if text else []
        if not self._chat:
            return [self._fresh(Choice(self.index, text=text), fresh)]
        chunks = [
            Choice(self.index, delta=delta) for delta in deltas or [Delta(content="")][:fresh]
        ]
        return [self._fresh(chunk, 0 if at else fresh) for at, chunk in enumerate(chunks)]

    def _fresh(self, chunk: Choice, fresh: int) -> Choice:
        if not fresh:
            return chunk
        start = len(self.token_ids) - fresh
        ids = self.token_ids[start:] if self._shows_ids else UNSET
        return replace(chunk, logprobs=self._logprobs_from(start), token_ids=ids)

    def _reasons_of(self, finish: Finish) -> dict[str, Any]:
        if self._prompt_only:
            finish = Finish.LENGTH
        reason = Finish.STOP.value if self.stopped else finish.value
        last = self.token_ids[-1] if self.token_ids else None
        if reason != Finish.STOP or last not in self._stop_token_ids:
            last = None
        named = self.message.finish_reason(reason)
        return {"finish_reason": named, "stop_reason": self._stream.stop_hit or last}

    def _logprobs_from(self, start: int) -> Any:
        if self._logprobs is None:
            return None
        entries = self._logprobs[start:]
        if self._chat:
            return chat_logprobs(self._tokenizer, entries)
        return completion_logprobs(self._tokenizer, entries, self._offsets[start:])

    def _echo_logprobs(self) -> CompletionLogprobs | None:
        scored = self._beginning.scored_prompt
        if self._echoed_logprobs is None or scored is None:
            return None
        return scored.echoed(self._tokenizer, self._echoed_logprobs, self._beginning.echo)


_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    """An answer to one prompt. Call `tokens` and `end` for each choice, then `close`, or `error`."""

    def __init__(
        self,
        request: AnyRequest,
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
        beginning: Beginning | None = None,
        message_form: MessageForm = MessageForm(),  # noqa: B008 - a constant
    ) -> None:
        """`so_far` was made elsewhere.

        A `part` of several prompts counts choices from `first_index`, and leaves a stream's end to
        sse.py. Raises RequestError for a `so_far` that cannot be continued.
        """
        self.streams = bool(request.stream)
        self._part = part
        self.beginning = beginning or Beginning()
        self.cached_tokens, self.pinned_tokens = cached_tokens, 0
        """Set with the first update."""
        self.choices = [
            ChoiceWriter(
                request,
                tokenizer,
                params,
                first_index + at,
                MessageStream(message_form, response_id, first_index + at),
                each,
                self.beginning,
            )
            for at, each in enumerate(so_far)
        ]
        self._chat = isinstance(request, ChatRequest)
        whole = "chat.completion" if self._chat else "text_completion"
        self._object = "chat.completion.chunk" if self._chat and self.streams else whole
        options = request.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self._usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        self.response_id, self.created, self.model = response_id, created, model
        self.prompt_tokens = prompt_tokens

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    def tokens(
        self, choice: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> bytes:
        return self._events(self.choices[choice].tokens(token_ids, logprobs or ()))

    def end(self, choice: int, finish: Finish) -> bytes:
        return self._events(self.choices[choice].end(finish))

    def close(self, handover: KvTransferParams | None = None) -> bytes:
        """Return the end of the answer: usage and [DONE], or the whole JSON body."""
        if self.streams and self._part:
            return b""
        if self.streams:
            return (self._event(None) if self.include_usage else b"") + sse.DONE
        ended = [choice.whole() for choice in self.choices if choice.ended]
        carried = UNSET if handover is None else handover
        return self._encoded(ended, self._usage(), carried, begins=True)

    def cut(self, handover: KvTransferParams | None = None) -> bytes:
        begun = [
            at for at, choice in enumerate(self.choices) if choice.token_ids and not choice.ended
        ]
        return b"".join([self.end(at, Finish.LENGTH) for at in begun]) + self.close(handover)

    def error(self, error: KvrelayError) -> bytes:
        """Return the end of an answer that broke: an event and [DONE], or the error's JSON body."""
        return sse.error_event(error) if self.streams else error.json()

    def _events(self, chunks: Sequence[Choice]) -> bytes:
        return b"".join([self._event(chunk) for chunk in chunks])

    def _event(self, choice: Choice | None) -> bytes:
        usage = self._usage() if choice is None or self._usage_in_chunks else UNSET
        begins = choice is not None and choice.delta is not UNSET and choice.delta.role is not None
        return sse.event(self._encoded([choice] if choice else [], usage, begins=begins))

    def _encoded(
        self,
        choices: list[Choice],
        usage: Usage | UnsetType,
        handover: KvTransferParams | UnsetType = UNSET,
        *,
        begins: bool,
    ) -> bytes:
        head = (self.response_id, self._object, self.created, self.model)
        ids = self.beginning.prompt_token_ids if begins and self._chat else UNSET
        return _encode(Answer(*head, choices, usage, handover, ids))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of all choices, and of the prompt found in a prefix cache."""
        return (
            self.prompt_tokens,
            sum(len(choice.token_ids) for choice in self.choices),
            self.cached_tokens,
        )

    @property
    def written_tokens(self) -> int:
        """Tokens of the prompt that were not cached and are pinned now."""
        # The answer may fill the block that the prompt ends in.
        return max(0, min(self.pinned_tokens, self.prompt_tokens) - self.cached_tokens)

    def _usage(self) -> Usage:
        return Usage.from_counts(*self.counts, self.written_tokens)
