"""POST /v1/responses: its body as a chat completion. Pure and light."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvrelay.openai_api.dialects.base import (
    assistant,
    encoded,
    function_tools,
    joined_system,
    passed_on,
    text_of,
)
from kvrelay.openai_api.json_body import read_json, refuser
from kvrelay.openai_api.types import MAX_MESSAGES, NotEmpty, Tools
from kvrelay.wire.errors import RequestError
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import LogprobCount, Positive, Temperature, TopP

__all__ = [
    "Item",
    "ReasoningConfig",
    "ResponsesRequest",
    "TextConfig",
    "chat_body",
    "check_count",
    "decode_responses",
    "own_items",
]

Item = JsonObject

_MESSAGE_PARTS = ("input_text", "output_text", "text", "refusal")
_ROLES = ("user", "assistant", "system", "developer")
_WITH_LOGPROBS = "message.output_text.logprobs"


class ReasoningConfig(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class TextConfig(Struct, frozen=True):
    format: JsonObject | None = None
    verbosity: str | None = None


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """A body of POST /v1/responses, besides fields of a chat completion."""

    model: str | None = None
    input: NotEmpty | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Tools | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: LogprobCount | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _WITH_LOGPROBS in (self.include or ())


_decoder = msgspec.json.Decoder(ResponsesRequest)
_refuse = refuser(
    {
        "background": ((False,), "the answer comes with the request; leave it out, or stream"),
        "conversation": ((), "use previous_response_id"),
        "prompt": ((), "prompt templates are not kept here; send instructions and input"),
        "truncation": (
            ("disabled",),
            "nothing is cut from an input here; shorten it yourself, or leave it out",
        ),
    }
)


def decode_responses(body: bytes) -> ResponsesRequest:
    """Return the request. Raises RequestError."""
    request = read_json(body, _decoder)
    _refuse(body)
    return request


def check_count(count: int) -> None:
    """Raise RequestError for too many items, with those of earlier turns."""
    if count > MAX_MESSAGES:
        raise RequestError(
            f"input has {count} items with those before it; the limit is {MAX_MESSAGES}; begin a "
            "new conversation without previous_response_id, with a summary of this one",
            param="previous_response_id",
        )


def own_items(request: ResponsesRequest) -> list[Item]:
    """Return the input as items, each with its type. Raises RequestError."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return [{**item, "type": _kind(item, at)} for at, item in enumerate(request.input)]


def _kind(item: Item, at: int) -> str:
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str):
        raise RequestError(f"input[{at}].type is missing", param=f"input[{at}]")
    return kind


def chat_body(request: ResponsesRequest, items: Sequence[Item], body: bytes) -> bytes:
    """Return the chat completion that a request means. Raises RequestError."""
    messages = (
        [] if not request.instructions else [{"role": "system", "content": request.instructions}]
    )
    for at, item in enumerate(items):
        _add(messages, item, at)
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = "\n".join(message["content"])
    every: JsonObject = {
        **passed_on(body),
        "model": request.model,
        "messages": joined_system(messages),
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": True if request.wants_logprobs else None,
        "top_logprobs": request.top_logprobs,
        "parallel_tool_calls": request.parallel_tool_calls if request.tools else None,
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "user": request.user,
        **_tools(request),
    }
    return encoded(every)


def _add(messages: list[JsonObject], item: Item, at: int) -> None:
    # An assistant's content stays a list of texts until all items are added.
    where = f"input[{at}]"
    kind = item.get("type")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}",
                param=f"{where}.role",
            )
        text = text_of(item.get("content"), _MESSAGE_PARTS, f"{where}.content")
        if role == "assistant":
            last = assistant(messages)
            if last["content"] is None:
                last["content"] = []
            last["content"].append(text)
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": text})
    elif kind == "function_call":
        calls = assistant(messages).setdefault("tool_calls", [])
        function = {name: _required(item, name, where) for name in ("name", "arguments")}
        calls.append(
            {"id": _required(item, "call_id", where), "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        text = text_of(item.get("output"), _MESSAGE_PARTS, f"{where}.output")
        messages.append(
            {"role": "tool", "tool_call_id": _required(item, "call_id", where), "content": text}
        )
    elif kind == "reasoning":
        text = text_of(
            item.get("content") or item.get("summary"), ("reasoning_text", "summary_text"), where
        )
        if text:
            # Begins a turn: a reasoning behind an answer belongs to the next one.
            messages.append({"role": "assistant", "content": None, "reasoning": text})
    else:
        raise RequestError(
            f"{where} is of type {kind!r}; messages, function calls, their outputs and reasoning "
            "are served",
            param=where,
        )


def _required(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is missing", param=f"{where}.{name}")
    return value


def _tools(request: ResponsesRequest) -> JsonObject:
    tools = function_tools(request.tools, ("function",), "parameters")
    choice: Any = request.tool_choice
    match choice:
        case {"type": "function", "name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case dict():
            raise RequestError(
                'tool_choice must be none, auto, required or {"type": "function", "name": ...}; send '
                "only the tools that may be called",
                param="tool_choice",
            )
    if not tools:
        # Without tools the API's own default, auto, asks for nothing.
        return {"tool_choice": None if choice in ("auto", "none") else choice}
    return {"tools": tools, "tool_choice": choice}


def _response_format(text: TextConfig | None) -> JsonObject | None:
    wanted = text.format if text else None
    kind = wanted.get("type") if wanted else "text"
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise RequestError(
            f"text.format.type must be text, json_object or json_schema, got {kind!r}",
            param="text.format",
        )
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
