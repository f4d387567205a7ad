"""The answer of POST /v1/messages, made of a chat completion: the Anthropic API's events, or one
message. Pure.

A whole answer is a stream of one chunk whose events nobody sees; so both are one state machine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.openai_api.anthropic_request import MessagesRequest, chat_body, decode_messages
from kvrelay.openai_api.chat_events import (
    ChatChoice,
    ChatEvent,
    ChatEvents,
    ChatUsage,
    ToolCall,
    whole_chat,
)
from kvrelay.openai_api.dialect import KEEP_ALIVE, Dialect
from kvrelay.wire.errors import ErrorBody, NodeFailed

__all__ = ["AnthropicAnswer", "anthropic_error", "speak_anthropic"]

_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STATUS_OF = {"overloaded_error": 429, "service_unavailable": 503, "deadline_exceeded": 504}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_error(status: int, error: ErrorBody) -> bytes:
    """`{"type": "error", "error": {...}}`."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": error.message}})


def speak_anthropic(body: bytes, message_id: str) -> tuple[bytes, Dialect]:
    """A Speak (openai_api/dialect.py). `message_id` begins with msg_. Raises RequestError."""
    request = decode_messages(body)
    return chat_body(request, body), AnthropicAnswer(request, message_id)


class AnthropicAnswer:
    """One answer in the Anthropic API."""

    chat = True

    def __init__(self, request: MessagesRequest, message_id: str) -> None:
        self._request = request
        self._id = message_id
        self._chunks = ChatEvents()
        self._sent: list[bytes] = []
        self._blocks: list[dict[str, Any]] = []
        self._grows: list[str] | None = None  # pieces of the block that is open
        self._call: int | None = None  # index of the tool call that is open
        self._calls = 0
        self._begun = self._over = False
        self._finish: str | None = None
        self._stopped_by: int | str | None = None
        self._usage = ChatUsage()

    def events(self, payload: bytes) -> bytes:
        """Bytes of a streamed chat completion as events of this API."""
        if self._over:
            return b""
        try:
            for chunk in self._chunks.feed(payload):
                self._take(chunk)
            if self._chunks.done:
                self._end()
        except NodeFailed as why:
            self._fail(why.body())
        sent = b"".join(self._sent)
        self._sent.clear()
        return sent

    def keep_alive(self) -> bytes:
        """A ping; before the message has begun, a comment."""
        return _event("ping") if self._begun else KEEP_ALIVE

    def whole(self, body: bytes) -> bytes:
        """The message as one object. Raises NodeFailed."""
        self._take(whole_chat(body))
        self._end()
        self._sent.clear()
        return _encode(self._message(self._blocks, *self._stop()))

    def error(self, status: int, error: ErrorBody) -> bytes:
        """The error in this API's shape."""
        return anthropic_error(status, error)

    def _say(self, kind: str, **values: Any) -> None:
        self._sent.append(_event(kind, **values))

    def _take(self, event: ChatEvent) -> None:
        if event.error is not None:
            self._fail(event.error)
            return
        self._usage = event.usage or self._usage
        self._begin()
        for choice in event.choices:
            self._add(choice)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._say("message_start", message=self._message([], None, None))

    def _add(self, choice: ChatChoice) -> None:
        said = choice.said
        if said.thought:
            self._text("thinking", said.thought)
        if said.content:
            self._text("text", said.content)
        for at, call in enumerate(said.tool_calls or ()):
            self._tool(at if call.index is None else call.index, call)
        if choice.finish_reason is not None:
            self._finish, self._stopped_by = choice.finish_reason, choice.stop_reason

    def _text(self, kind: str, text: str) -> None:
        if self._grows is None or self._blocks[-1]["type"] != kind:
            self._open(
                {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            )
        self._grow(f"{kind}_delta", kind, text)

    def _tool(self, index: int, call: ToolCall) -> None:
        if index >= self._calls:
            self._calls, call_id = (
                index + 1,
                call.id or f"toolu_{self._id.removeprefix('msg_')}{index}",
            )
            self._open(
                {"type": "tool_use", "id": call_id, "name": call.function.name or "", "input": {}}
            )
            self._call = index
        elif index != self._call:
            raise NodeFailed(
                "a node went on with a tool call that had ended; send the request again"
            )
        if call.function.arguments:
            self._grow("input_json_delta", "partial_json", call.function.arguments)

    def _open(self, block: dict[str, Any]) -> None:
        self._close()
        self._say("content_block_start", index=len(self._blocks), content_block=block)
        self._blocks.append(block)
        self._grows = []

    def _grow(self, kind: str, name: str, piece: str) -> None:
        assert self._grows is not None
        self._grows.append(piece)
        self._say(
            "content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: piece}
        )

    def _close(self) -> None:
        """End the open block, if there is one: there is never more than one."""
        if self._grows is None:
            return
        block, text = self._blocks[-1], "".join(self._grows)
        self._blocks[-1] = {
            **block,
            **({"input": _arguments(text)} if "input" in block else {block["type"]: text}),
        }
        self._say("content_block_stop", index=len(self._blocks) - 1)
        self._grows = self._call = None

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._begin()
        self._close()
        reason, sequence = self._stop()
        self._say(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=self._counts(),
        )
        self._say("message_stop")

    def _fail(self, error: ErrorBody) -> None:
        """It broke after the first event."""
        self._over = True
        self._sent.append(
            b"event: error\ndata: %b\n\n" % anthropic_error(_STATUS_OF.get(error.type, 500), error)
        )

    def _stop(self) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)."""
        if self._finish == "stop" and self._calls:
            return (
                "tool_use",
                None,
            )  # chat completions say `stop` when the client has named the tool
        if self._finish == "stop" and self._stopped_by in (self._request.stop_sequences or ()):
            return "stop_sequence", str(self._stopped_by)
        if self._finish == "length" and self._usage.completion_tokens < self._request.max_tokens:
            return (
                "model_context_window_exceeded",
                None,
            )  # max_tokens was more than the context has room for
        return _STOP_REASONS.get(self._finish or "stop", "end_turn"), None

    def _counts(self) -> dict[str, Any]:
        # This API counts what was found in a cache apart.
        return {
            "input_tokens": self._usage.prompt_tokens - self._usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._usage.cached_tokens,
            "output_tokens": self._usage.completion_tokens,
        }

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._counts(),
        }


def _event(kind: str, **values: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **values}))


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; what is none (the answer was cut) is kept as text under one
    name.
    """
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {"incomplete_json": text}
