"""Client dialects: what each must provide, and what their translations share. Pure and light."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from kvrelay.openai_api.json_body import json_errors
from kvrelay.wire.errors import ErrorBody, NodeFailed, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "AS_IS",
    "ChatChoice",
    "ChatEvent",
    "ChatEvents",
    "ChatUsage",
    "Dialect",
    "Events",
    "KEEP_ALIVE",
    "MAX_MESSAGES",
    "MAX_TOOLS",
    "PASSED_ON",
    "Said",
    "Translate",
    "ToolCall",
    "untranslated",
    "assistant",
    "check_messages",
    "check_tools",
    "decoded",
    "function_tool",
    "joined_system",
    "openai_error",
    "passed_on",
    "text_of",
    "whole_chat",
]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients of any dialect skip it."""


class Dialect(Protocol):
    """One answer, from the bytes of a chat completion to those that the client wants. Used for one
    answer only.
    """

    chat: bool
    """False: it is made of a text completion instead."""

    def events(self, payload: bytes) -> bytes:
        """Bytes of a streamed chat completion, cut anywhere, as events; an error event in them too."""
        ...

    def keep_alive(self) -> bytes:
        """What is sent when nothing has come for a while."""
        ...

    def whole(self, body: bytes) -> bytes:
        """A whole chat completion as a whole answer. Raises NodeFailed if it is none."""
        ...

    def error(self, status: int, error: ErrorBody) -> bytes:
        """The body of an error answer."""
        ...


Translate = Callable[[bytes], tuple[bytes, Dialect]]
"""From a request body to that of a chat completion, and the dialect of its answer. Raises
RequestError.
"""


def openai_error(status: int, error: ErrorBody) -> bytes:
    """`{"error": {...}}`."""
    return msgspec.json.encode({"error": error})


class _AsIs:
    """Chat completions (and text completions): a move of bytes."""

    chat = True

    def events(self, payload: bytes) -> bytes:
        return payload

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def whole(self, body: bytes) -> bytes:
        return body

    def error(self, status: int, error: ErrorBody) -> bytes:
        return openai_error(status, error)


AS_IS: Dialect = _AsIs()


def untranslated(body: bytes) -> tuple[bytes, Dialect]:
    """The Translate of chat and text completions."""
    return body, AS_IS


MAX_MESSAGES = 16384
"""Far above any conversation; each is rendered by a template."""
MAX_TOOLS = 1024

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
    "chat_template_kwargs",
    "priority",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
"""Fields of ours (and vLLM's) that no dialect has a word for: they mean what they mean in a chat
completion.
"""

_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

Message = dict[str, Any]


def passed_on(body: bytes) -> dict[str, Any]:
    """Find the fields of PASSED_ON that a body has, as they are. Raises RequestError."""
    with json_errors():
        fields = _raw_decoder.decode(body)
    return {name: fields[name] for name in PASSED_ON if name in fields}


def text_of(content: Any, types: tuple[str, ...], where: str) -> str:
    """The text of a string or of parts of these types. Raises RequestError at any other part."""
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


def assistant(messages: list[Message]) -> Message:
    """The assistant's message at the end of `messages`, added if there is none: one turn is one
    message.
    """
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def joined_system(messages: list[Message]) -> list[Message]:
    """With one system message at the beginning instead of several: many chat templates take one,
    and only there.
    """
    count = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def check_messages(messages: Sequence[object]) -> None:
    """Raise RequestError if there are more messages than a chat completion may have."""
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages holds {len(messages)} messages; the limit is {MAX_MESSAGES}; send fewer",
            param="messages",
        )


def check_tools(tools: Sequence[object] | None) -> None:
    """Raise RequestError if there are more tools than a chat completion may have."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools lists {len(tools)} tools; the limit is {MAX_TOOLS}; send fewer", param="tools"
        )


def function_tool(tool: dict[str, Any], parameters: str, where: str) -> dict[str, Any]:
    """A tool as chat completions have it; `parameters` is the field with its schema. Raises
    RequestError.
    """
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(
            f"{where}.name is missing; a function tool needs one", param=f"{where}.name"
        )
    given = {
        "description": tool.get("description"),
        "parameters": tool.get(parameters),
        "strict": tool.get("strict"),
    }
    function = {"name": name, **given}
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


T = TypeVar("T")


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call, or what a chunk adds to one: `id` and `name` come once, `arguments` in pieces."""

    index: int | None = None
    id: str | None = None
    function: _Function = _Function()


class Said(msgspec.Struct, frozen=True):
    """A message, or what a chunk adds to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The older name, which is all that older nodes of vLLM say."""
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str | None:
        """Reasoning, by whichever name it goes."""
        return self.reasoning or self.reasoning_content


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[dict[str, Any]] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """Of a chunk (`delta`) or of a whole answer (`message`)."""

    delta: Said | None = None
    message: Said | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None

    @property
    def said(self) -> Said:
        """What it holds or adds."""
        return self.delta or self.message or Said()


class _Cached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Reasoned(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoned | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those found in a prefix cache."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0

    @property
    def reasoning_tokens(self) -> int:
        """Of the answer, those of its reasoning, where the answer tells."""
        return (
            (self.completion_tokens_details.reasoning_tokens or 0)
            if self.completion_tokens_details
            else 0
        )


class ChatEvent(msgspec.Struct, frozen=True):
    """One chunk, one whole answer, or an error."""

    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: ErrorBody | None = None


_decoder = msgspec.json.Decoder(ChatEvent)


class Events(Generic[T]):
    """Cuts a byte stream into events. `done` once [DONE] has come."""

    def __init__(self, decoder: msgspec.json.Decoder[T]) -> None:
        self.done = False
        self._decoder = decoder
        self._rest = b""

    def feed(self, payload: bytes) -> list[T]:
        """All events completed by `payload`; comments are skipped. Raises NodeFailed on one that is
        malformed.
        """
        *blocks, self._rest = (self._rest + payload).split(b"\n\n")
        events: list[T] = []
        for block in blocks:
            if not block.startswith(b"data: "):
                continue
            data = block[6:]
            if data == b"[DONE]":
                self.done = True
            else:
                events.append(decoded(self._decoder, data))
        return events


class ChatEvents(Events[ChatEvent]):
    """Those of a chat completion."""

    def __init__(self) -> None:
        super().__init__(_decoder)


def whole_chat(body: bytes) -> ChatEvent:
    """A whole answer. Raises NodeFailed if it is none."""
    answer = decoded(_decoder, body)
    if not answer.choices:
        raise NodeFailed("a node sent an answer without a choice; send the request again")
    return answer


def decoded(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """A node's JSON. Raises NodeFailed if it is malformed."""
    try:
        return decoder.decode(data)
    except MALFORMED as why:
        raise NodeFailed(f"a node sent a malformed completion: {why}") from why
