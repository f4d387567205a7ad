"""Reads the answer to a chat completion back: events from bytes that are cut anywhere, or one whole
body.

Only for answers that are wanted in another dialect; plain chat completions are never parsed on
their way.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvrelay.wire.errors import ErrorBody, NodeFailed
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "ChatChoice",
    "ChatEvent",
    "ChatEvents",
    "ChatUsage",
    "Events",
    "Said",
    "ToolCall",
    "decoded",
    "whole_chat",
]

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
