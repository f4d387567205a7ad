"""Client dialects, and what their translations share. Pure and light.

Inside the cluster there are chat and text completions only.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from kvrelay.openai_api.json_body import read_json
from kvrelay.openai_api.types import Delta, ToolCallDelta
from kvrelay.wire.errors import ErrorBody, NodeFailed, RequestError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.json_object import JsonObject

__all__ = [
    "AS_IS",
    "KEEP_ALIVE",
    "PASSED_ON",
    "AnswerPart",
    "ChatAnswer",
    "ChatEvent",
    "ChatUsage",
    "Dialect",
    "Translate",
    "assistant",
    "encoded",
    "function_tools",
    "joined_system",
    "named_event",
    "openai_error",
    "passed_on",
    "text_of",
]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which all clients skip."""

PASSED_ON = (
    "seed",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "skip_special_tokens",
    "request_id",
    "session_id",
    "cache_salt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "chat_template_kwargs",
    "priority",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
"""Fields of chat completions that every dialect takes."""


def openai_error(status: int, error: ErrorBody) -> bytes:
    return msgspec.json.encode({"error": error})


class Dialect:
    """A translation of a chat completion's answer; this one changes nothing."""

    def events(self, payload: bytes) -> bytes:
        """Translate bytes of a stream, cut anywhere."""
        return payload

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def whole(self, body: bytes) -> bytes:
        """Translate a whole completion. Raises NodeFailed if it is none."""
        return body

    def error(self, status: int, error: ErrorBody) -> bytes:
        return openai_error(status, error)


Translate = Callable[[bytes, int], Awaitable[tuple[bytes, Dialect]]]
"""From a body, and the bytes allowed in all, to a completion's body and the answer's dialect.

Raises KvrelayError.
"""

AS_IS = Dialect()


_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def passed_on(body: bytes) -> JsonObject:
    """Return the fields of PASSED_ON, undecoded. Raises RequestError."""
    fields = read_json(body, _raw_decoder)
    return {name: fields[name] for name in PASSED_ON if name in fields}


def encoded(fields: JsonObject) -> bytes:
    """Return a body of the fields that are not None."""
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


def text_of(content: Any, types: tuple[str, ...], where: str) -> str:
    """Return the text of a string or of parts of these types. Raises RequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(
            f"{where} must be a text or a list of parts, got {type(content).__name__}", param=where
        )
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types:
            raise RequestError(
                f"{where} holds a part of type {kind!r}; this model reads text only "
                f"({', '.join(types)})",
                param=where,
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(
                f"{where} holds a part of type {kind!r} without its text", param=where
            )
        texts.append(text)
    return "\n".join(texts)


def assistant(messages: list[JsonObject]) -> JsonObject:
    """Return the assistant's message at the end, added if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def joined_system(messages: list[JsonObject]) -> list[JsonObject]:
    """Join the first system messages: many templates take one only."""
    others = (i for i, message in enumerate(messages) if message["role"] != "system")
    count = next(others, len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def function_tools(
    tools: list[JsonObject] | None, kinds: tuple[str | None, ...], parameters: str
) -> list[JsonObject]:
    """Return tools of these types as chat completions have them. Raises RequestError.

    Their schemas are in the field `parameters`.
    """
    found = []
    for at, tool in enumerate(tools or ()):
        if tool.get("type") not in kinds:
            raise RequestError(
                f"tools[{at}] is of type {tool.get('type')!r:.100}; only {kinds[0]} tools are served, "
                "which the client runs",
                param=f"tools[{at}].type",
                code="unsupported_parameter",
            )
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(f"tools[{at}].name is missing", param=f"tools[{at}].name")
        function = {
            "name": name,
            "description": tool.get("description"),
            "parameters": tool.get(parameters),
            "strict": tool.get("strict"),
        }
        given = {key: value for key, value in function.items() if value is not None}
        found.append({"type": "function", "function": given})
    return found


class EventChoice(msgspec.Struct, frozen=True):
    """A choice of a chunk (`delta`) or a whole answer (`message`)."""

    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: JsonObject | None = None


class ChatUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: JsonObject | None = None
    completion_tokens_details: JsonObject | None = None

    def detail(self, name: str) -> int:
        details = (self.prompt_tokens_details or {}) | (self.completion_tokens_details or {})
        return details.get(name) or 0


class ChatEvent(msgspec.Struct, frozen=True):
    choices: list[EventChoice] = []
    usage: ChatUsage | None = None
    error: ErrorBody | None = None


_event_decoder = msgspec.json.Decoder(ChatEvent)


def _decoded(data: bytes) -> ChatEvent:
    try:
        return _event_decoder.decode(data)
    except MALFORMED as why:
        raise NodeFailed(f"a node sent a malformed completion: {why}") from why


def named_event(kind: str, **values: Any) -> bytes:
    event = msgspec.json.encode({"type": kind, **values})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), event)


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer: reasoning, content or a call. One at a time is open."""

    at: int
    kind: str
    value: JsonObject = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)


class ChatAnswer(Dialect, abc.ABC):
    """A dialect's answer, made of a chat completion.

    A whole answer is a stream of one chunk whose events nobody sees.
    """

    begins_at_once: ClassVar[bool]
    """The first events come before the first chunk."""
    kinds: ClassVar[tuple[str, str, str]]
    """Names of reasoning, of content and of a call."""
    call_prefix: ClassVar[str]

    def __init__(self, answer_id: str) -> None:
        self._suffix = answer_id.partition("_")[2]
        self._parts: list[AnswerPart] = []
        self._open: AnswerPart | None = None
        self._calls = 0
        self._rest = b""  # of an event
        self._sent: list[bytes] = []
        self._begun = self._over = False
        self._usage = ChatUsage()
        self._finish = "stop"
        self._stopped_by: int | str | None = None

    def events(self, payload: bytes) -> bytes:
        if self._over:
            return b""
        if self.begins_at_once:
            self._begin_once()
        try:
            *blocks, self._rest = (self._rest + payload).split(b"\n\n")
            for block in blocks:
                if self._over:
                    break
                if block == b"data: [DONE]":
                    self._finished()
                elif block.startswith(b"data: "):
                    self._take(_decoded(block[6:]))
        except NodeFailed as why:
            self._take(ChatEvent(error=why.body()))
        return self._flush()

    def whole(self, body: bytes) -> bytes:
        answer = _decoded(body)
        if not answer.choices:
            raise NodeFailed("a node sent an answer without a choice; send the request again")
        self._take(answer)
        answer_object = self._finished()
        self._sent.clear()
        return msgspec.json.encode(answer_object)

    def _flush(self) -> bytes:
        sent = b"".join(self._sent)
        self._sent.clear()
        return sent

    def _take(self, event: ChatEvent) -> None:
        if event.error is not None:
            self._over = True
            self._fail(event.error)
            return
        self._usage = event.usage or self._usage
        self._begin_once()
        for choice in event.choices:
            delta = choice.delta or choice.message or Delta()
            if delta.thought:
                self._text(self.kinds[0], delta.thought, [])
            if delta.content:
                logprobs = (choice.logprobs or {}).get("content") or []
                self._text(self.kinds[1], delta.content, logprobs)
            for at, call in enumerate(delta.tool_calls or ()):
                self._call(at if call.index is None else call.index, call)
            if choice.finish_reason is not None:
                self._finish, self._stopped_by = choice.finish_reason, choice.stop_reason

    def _begin_once(self) -> None:
        if not self._begun:
            self._begun = True
            self._begin()

    def _finished(self) -> JsonObject:
        self._over = True
        self._begin_once()
        return self._end()

    def _text(self, kind: str, text: str, logprobs: list[JsonObject]) -> None:
        part = self._open
        if part is None or part.kind != kind:
            part = self._add(kind, {})
        part.logprobs += logprobs
        self._grow(part, text, logprobs)

    def _call(self, index: int, call: ToolCallDelta) -> None:
        kind, part = self.kinds[2], self._open
        if index >= self._calls:
            self._calls = index + 1
            call_id = call.id or f"{self.call_prefix}_{self._suffix}{index}"
            part = self._add(kind, {"id": call_id, "name": call.function.name or ""})
        elif part is None or part.kind != kind or index + 1 < self._calls:
            raise NodeFailed("a node went on with a call that had ended; send the request again")
        if call.function.arguments:
            self._grow(part, call.function.arguments, [])

    def _add(self, kind: str, call: JsonObject) -> AnswerPart:
        self._close()
        part = self._open = AnswerPart(len(self._parts), kind)
        part.value = self._opened(part, call)
        self._parts.append(part)
        return part

    def _grow(self, part: AnswerPart, piece: str, logprobs: list[JsonObject]) -> None:
        part.pieces.append(piece)
        self._grown(part, piece, logprobs)

    def _close(self, status: str = "completed") -> None:
        part, self._open = self._open, None
        if part is not None:
            part.value = self._closed(part, "".join(part.pieces), status)

    @abc.abstractmethod
    def _begin(self) -> None:
        """Send the first events."""

    @abc.abstractmethod
    def _opened(self, part: AnswerPart, call: JsonObject) -> JsonObject:
        """Send the events that begin a part, and return its value; `call` has id and name."""

    @abc.abstractmethod
    def _grown(self, part: AnswerPart, piece: str, logprobs: list[JsonObject]) -> None: ...

    @abc.abstractmethod
    def _closed(self, part: AnswerPart, text: str, status: str) -> JsonObject:
        """Send the events that end a part, and return its value."""

    @abc.abstractmethod
    def _end(self) -> JsonObject:
        """Send the last events and return the answer."""

    @abc.abstractmethod
    def _fail(self, error: ErrorBody) -> None: ...
