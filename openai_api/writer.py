"""Turns an engine's tokens into the bytes of an answer: SSE events, or one JSON body. One class for all roles. Pure.

Its state is a function of the request and the token ids. A writer on another node that is given the tokens so far
goes on where this one stood: the client sees the bytes of one writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from openai_api import sse
from openai_api.logprobs import chat_logprobs, completion_logprobs
from openai_api.text_stream import TextStream
from openai_api.tokenizer import Tokenizer
from openai_api.types import (
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
    PromptTokensDetails,
    ReplyMessage,
    Usage,
)
from wire.errors import KvrelayError, RequestError
from wire.outputs import Finish, TokenLogprobs
from wire.sampling import SamplingParams
from wire.transfer import KvTransferParams

__all__ = ["AnswerWriter"]

_ROLE = "assistant"
_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    """One answer with one choice. Call `tokens` for each update and then `end` once, or `error` if it broke.

    `generated` are tokens of the answer made elsewhere, `sent_text` the characters of their text that the client has
    (None: it has nothing, no role either). Then `stopped` may be true at once: the answer is complete, call `end`.
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
        generated: Sequence[int] = (),
        generated_logprobs: Sequence[TokenLogprobs] = (),
        sent_text: int | None = None,
    ) -> None:
        """Raises RequestError if log-probabilities are asked for and those of `generated` are not all there."""
        self.streams = bool(request.stream)
        self.cached_tokens = cached_tokens
        """Of the prompt, those found in a prefix cache. Known when the first update comes; set it then."""
        self.token_ids: list[int] = []
        """All tokens of the answer so far, replayed ones too, none behind a stop string."""
        self._chat = isinstance(request, ChatRequest)
        whole = "chat.completion" if self._chat else "text_completion"
        self._object = "chat.completion.chunk" if self._chat and self.streams else whole
        options = request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        self._tokenizer = tokenizer
        self._params = params
        self._id, self._created, self._model = response_id, created, model
        self._prompt_tokens = prompt_tokens
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._offsets: list[int] = []  # of each token's text; kept with log-probabilities only
        self._text: list[str] = []  # all released; kept for whole answers only
        self._stream = TextStream(
            tokenizer,
            request.stop_strings,
            bool(request.include_stop_str_in_output),
            request.skip_special_tokens is not False,
            params.min_tokens,
        )
        self._begun = False
        self._unsent = ""  # released while replaying and not with the client yet
        self._unsent_logprobs = 0  # of the last tokens
        self._replay(generated, generated_logprobs, sent_text)

    @property
    def stopped(self) -> bool:
        """A stop string was hit: abort the request in the engine and call `end`."""
        return self._stream.stop_hit is not None

    @property
    def sent_text(self) -> int:
        """Characters of text that the client has once it has all bytes so far."""
        return self._stream.sent - len(self._unsent)

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> bytes:
        """Take new tokens; the events to send now, always empty if the client does not stream.

        With no new tokens: what a replay left unsent. Tokens behind a stop string are dropped.
        """
        text, self._unsent = self._unsent + self._take(token_ids, logprobs or ()), ""
        if not self.streams:
            return b""
        fresh, self._unsent_logprobs = self._unsent_logprobs, 0
        head = self._role_event() if self.token_ids else b""
        if not text and not fresh:
            return head
        return head + self._event(self._choice(text, fresh))

    def end(self, finish: Finish, handover: KvTransferParams | None = None) -> bytes:
        """The end of the answer: last events with usage and [DONE], or the whole JSON body.

        `handover` goes into the body (not into streams) for a proxy that carries it to the decode node.
        """
        text, self._unsent = self._unsent + self._stream.finish(), ""
        reason = Finish.STOP.value if self.stopped else finish.value
        if not self.streams:
            self._text.append(text)
            return _encode(self._whole(reason, UNSET if handover is None else handover))
        last = self._choice(text, self._unsent_logprobs, reason, self._stop_reason(reason))
        payload = self._role_event() + self._event(last)
        if self._include_usage:
            payload += self._event(None)
        return payload + sse.DONE

    def error(self, error: KvrelayError) -> bytes:
        """The end of an answer that broke: an event and [DONE], or the JSON body of the error."""
        return sse.error_event(error) if self.streams else error.json()

    def _replay(self, generated: Sequence[int], logprobs: Sequence[TokenLogprobs], sent_text: int | None) -> None:
        if self._logprobs is not None and len(logprobs) != len(generated):
            raise RequestError(
                f"log-probabilities of {len(logprobs)} of {len(generated)} generated tokens were handed over and the "
                "request asks for all; send the request again",
                param="kv_transfer_params",
            )
        text = self._take(generated, logprobs)
        if sent_text is None:
            self._unsent = text
        else:
            self._begun = True
            self._unsent = text[sent_text:]
            self._unsent_logprobs = 0

    def _take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        """Count tokens up to a stop string; their text that may be sent."""
        released = []
        for i, token in enumerate(token_ids):
            if self.stopped:
                break
            if self._logprobs is not None:
                self._offsets.append(self._stream.decoded)
                self._logprobs.append(logprobs[i])
                self._unsent_logprobs += 1
            self.token_ids.append(token)
            released.append(self._stream.push(token))
        text = "".join(released)
        if not self.streams:
            self._text.append(text)
            return ""
        return text

    def _role_event(self) -> bytes:
        """The first event of a chat, once."""
        if self._begun or not self._chat:
            return b""
        self._begun = True
        return self._event(ChatChunkChoice(0, Delta(_ROLE, "")))

    def _choice(
        self,
        text: str,
        fresh: int,
        finish_reason: str | None = None,
        stop_reason: int | str | UnsetType | None = UNSET,
    ) -> ChatChunkChoice | CompletionChunkChoice:
        """A chunk's choice with the log-probabilities of the last `fresh` tokens."""
        start = len(self.token_ids) - fresh
        if not self._chat:
            completion = self._completion_logprobs(start) if fresh else None
            return CompletionChunkChoice(0, text, completion, finish_reason, stop_reason)
        # The last chunk's delta is empty if no text is left; all others say what they add.
        delta = Delta(content=text if text or finish_reason is None else None)
        return ChatChunkChoice(0, delta, self._chat_logprobs(start) if fresh else None, finish_reason, stop_reason)

    def _chat_logprobs(self, start: int) -> ChatLogprobs | None:
        return None if self._logprobs is None else chat_logprobs(self._tokenizer, self._logprobs[start:])

    def _completion_logprobs(self, start: int) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        return completion_logprobs(self._tokenizer, self._logprobs[start:], self._offsets[start:])

    def _event(self, choice: ChatChunkChoice | CompletionChunkChoice | None) -> bytes:
        """One chunk; without a choice it is the usage chunk."""
        usage = self._usage() if choice is None or self._usage_in_chunks else UNSET
        head = (self._id, self._object, self._created, self._model)
        if isinstance(choice, CompletionChunkChoice):
            return sse.event(_encode(CompletionChunk(*head, [choice], usage)))
        return sse.event(_encode(ChatChunk(*head, [] if choice is None else [choice], usage)))

    def _whole(self, reason: str, handover: KvTransferParams | UnsetType) -> ChatCompletion | Completion:
        text, stop = "".join(self._text), self._stop_reason(reason)
        head = (self._id, self._object, self._created, self._model)
        if self._chat:
            chat = ChatChoice(0, ReplyMessage(_ROLE, text), self._chat_logprobs(0), reason, stop)
            return ChatCompletion(*head, [chat], self._usage(), handover)
        choice = CompletionChoice(0, text, self._completion_logprobs(0), reason, stop)
        return Completion(*head, [choice], self._usage(), handover)

    def _stop_reason(self, reason: str) -> int | str | None:
        """The stop string, or the stop token that the request named; None for the model's own end."""
        if self.stopped:
            return self._stream.stop_hit
        last = self.token_ids[-1] if self.token_ids else None
        return last if reason == Finish.STOP and last in self._params.stop_token_ids else None

    def _usage(self) -> Usage:
        generated = len(self.token_ids)
        details = PromptTokensDetails(self.cached_tokens)
        return Usage(self._prompt_tokens, generated, self._prompt_tokens + generated, details)
