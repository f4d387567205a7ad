"""POST /v1/messages of the Anthropic API, as a chat completion and back. Pure and light."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvrelay.openai_api.dialects.base import (
    KEEP_ALIVE,
    AnswerPart,
    ChatAnswer,
    Dialect,
    assistant,
    encoded,
    function_tools,
    joined_system,
    named_event,
    passed_on,
    text_of,
)
from kvrelay.openai_api.json_body import one_of, read_json, refuser, wrong_value
from kvrelay.openai_api.types import MAX_MESSAGES, PIN_S, CacheControl, Tools
from kvrelay.wire.errors import ErrorBody, RequestError
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import Positive, Temperature, TopP

__all__ = [
    "AnthropicAnswer",
    "CountRequest",
    "MessagesRequest",
    "OutputConfig",
    "Thinking",
    "Turn",
    "anthropic_error",
    "count_body",
    "translate_messages",
]

_MAX_MARKERS = 4
_encode = msgspec.json.Encoder().encode


class Turn(Struct, frozen=True):
    role: Annotated[str, one_of("user", "assistant", "system")]
    content: str | list[JsonObject]


class Thinking(Struct, frozen=True):
    """A switch of thinking; the budget is not enforced."""

    type: Annotated[str, one_of("enabled", "adaptive", "disabled")]
    budget_tokens: int | None = None


class OutputFormat(Struct, frozen=True):
    type: Annotated[str, one_of("json_schema")]
    schema_: JsonObject = msgspec.field(name="schema")


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Struct, frozen=True, kw_only=True):
    """A body of POST /v1/messages/count_tokens: the prompt."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[JsonObject] | None = None
    tools: Tools | None = None
    tool_choice: JsonObject | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """A body of POST /v1/messages, besides fields of a chat completion."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    metadata: JsonObject | None = None
    cache_control: CacheControl | None = None


_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)
_CLIENT = "tools run at the client"
_refuse = refuser({"container": ((), _CLIENT), "mcp_servers": (([],), _CLIENT)})


def translate_messages(body: bytes, message_id: str) -> tuple[bytes, Dialect]:
    """Translate a body of POST /v1/messages. Raises RequestError."""
    request = read_json(body, _decoder)
    _refuse(body)
    user, passed = (request.metadata or {}).get("user_id"), passed_on(body)
    stream = {"include_usage": True, "continuous_usage_stats": True} if request.stream else None
    output = request.output_config or OutputConfig()
    schema = output.format and {"name": "output", "schema": output.format.schema_}
    every: JsonObject = {
        **_prompt(request),
        **passed,
        **_thinking(request.thinking, passed),
        "max_completion_tokens": request.max_tokens,
        "fit_max_tokens": True,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "stream_options": stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "user": user if isinstance(user, str) else None,
        "response_format": schema and {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": output.effort,
        "cache_control": _cache_control(request),
    }
    return encoded(every), AnthropicAnswer(request, message_id)


def _cache_control(request: MessagesRequest) -> CacheControl | None:
    """Return the longest wish of all markers. Raises RequestError."""
    parts = [("tools", request.tools), ("system", request.system)]
    parts += [(f"messages[{at}].content", turn.content) for at, turn in enumerate(request.messages)]
    found = [
        (f"{part}[{at}].cache_control", block["cache_control"])
        for part, blocks in parts
        if isinstance(blocks, list)
        for at, block in enumerate(blocks)
        if block.get("cache_control") is not None
    ]
    markers = list(filter(None, [request.cache_control]))
    if len(markers) + len(found) > _MAX_MARKERS:
        raise RequestError(
            f"the request has {len(markers) + len(found)} cache_control markers; the limit is "
            f"{_MAX_MARKERS}: mark the last blocks only, as each marker is for all before it",
            param=found[-1][0],
        )
    for place, value in found:
        try:
            markers.append(msgspec.convert(value, CacheControl))
        except msgspec.ValidationError as why:
            raise wrong_value(str(why), value, place) from why
    return max(markers, key=lambda each: PIN_S[each.ttl], default=None)


def count_body(body: bytes) -> bytes:
    """Return the body of POST /tokenize for count_tokens. Raises RequestError."""
    request = read_json(body, _count_decoder)
    return encoded({**_prompt(request), **_thinking(request.thinking, {})})


def _prompt(request: CountRequest) -> JsonObject:
    system = text_of(request.system, ("text",), "system")
    messages: list[JsonObject] = [{"role": "system", "content": system}] if system else []
    for at, message in enumerate(request.messages):
        _add(messages, message, at)
    # An answer that the client has begun is continued.
    begun = {"continue_final_message": True, "add_generation_prompt": False}
    last = messages[-1]
    goes_on = last["role"] == "assistant" and "tool_calls" not in last
    return {
        "model": request.model,
        "messages": joined_system(messages),
        **(begun if goes_on else {}),
        **_tools(request),
    }


def _add(messages: list[JsonObject], message: Turn, at: int) -> None:
    where = f"messages[{at}].content"
    if isinstance(message.content, str):
        messages.append({"role": message.role, "content": message.content})
        return
    if message.role == "assistant":
        messages.append({"role": "assistant", "content": None})
    texts: list[str] = []
    for i, block in enumerate(message.content):
        place = f"{where}[{i}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(call_id)} if message.role == "user":
                result = text_of(block.get("content"), ("text",), f"{place}.content")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
            case {"type": "tool_use", "id": str(call_id), "name": str(name)} if (
                message.role == "assistant"
            ):
                function = {"name": name, "arguments": _encode(block.get("input") or {}).decode()}
                call = {"id": call_id, "type": "function", "function": function}
                assistant(messages).setdefault("tool_calls", []).append(call)
            case {"type": "thinking", "thinking": str(text)} if message.role == "assistant":
                if text:
                    assistant(messages)["reasoning"] = text
            case {"type": "redacted_thinking"} if message.role == "assistant":
                pass  # only the model that wrote it can read it
            case _:
                raise RequestError(
                    f"{place} is a block of type {block.get('type')!r} that a {message.role} "
                    "message cannot have here; text, tool_use, tool_result and thinking blocks "
                    "are served",
                    param=place,
                )
    if message.role == "assistant":
        assistant(messages)["content"] = "\n".join(texts) if texts else None
    elif texts:
        messages.append({"role": message.role, "content": "\n".join(texts)})
    elif not message.content:
        raise RequestError(f"{where} must not be empty", param=where)


def _tools(request: CountRequest) -> JsonObject:
    if not request.tools:
        return {}
    tools = function_tools(request.tools, ("custom", None), "input_schema")
    choice = request.tool_choice or {"type": "auto"}
    match choice:
        case {"type": "auto" | "none" as wanted}:
            chosen: Any = wanted
        case {"type": "any"}:
            chosen = "required"
        case {"type": "tool", "name": str(name)}:
            chosen = {"type": "function", "function": {"name": name}}
        case _:
            raise RequestError(
                "tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice"
            )
    serial = choice.get("disable_parallel_tool_use") is True
    return {"tools": tools, "tool_choice": chosen, "parallel_tool_calls": False if serial else None}


def _thinking(thinking: Thinking | None, given: JsonObject) -> JsonObject:
    # Templates of models that can think or not read `enable_thinking`; others ignore it.
    if thinking is None or "chat_template_kwargs" in given:
        return {}
    return {"chat_template_kwargs": {"enable_thinking": thinking.type != "disabled"}}


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
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": error.message}})


class AnthropicAnswer(ChatAnswer):
    begins_at_once = False
    kinds = ("thinking", "text", "tool_use")
    call_prefix = "toolu"

    def __init__(self, request: MessagesRequest, message_id: str) -> None:
        super().__init__(message_id)
        self._request, self._id = request, message_id

    def keep_alive(self) -> bytes:
        return named_event("ping") if self._begun else KEEP_ALIVE

    def error(self, status: int, error: ErrorBody) -> bytes:
        return anthropic_error(status, error)

    def _send(self, kind: str, **values: Any) -> None:
        self._sent.append(named_event(kind, **values))

    def _begin(self) -> None:
        self._send("message_start", message=self._message([], None, None))

    def _opened(self, part: AnswerPart, call: JsonObject) -> JsonObject:
        value: JsonObject = {"type": part.kind}
        value |= {**call, "input": {}} if call else {part.kind: ""}
        if part.kind == "thinking":
            value["signature"] = ""
        self._send("content_block_start", index=part.at, content_block=value)
        return value

    def _grown(self, part: AnswerPart, piece: str, logprobs: list[JsonObject]) -> None:
        kind, name = f"{part.kind}_delta", part.kind
        if part.kind == "tool_use":
            kind, name = "input_json_delta", "partial_json"
        self._send("content_block_delta", index=part.at, delta={"type": kind, name: piece})

    def _closed(self, part: AnswerPart, text: str, status: str) -> JsonObject:
        self._send("content_block_stop", index=part.at)
        whole = {"input": _arguments(text)} if part.kind == "tool_use" else {part.kind: text}
        return part.value | whole

    def _end(self) -> JsonObject:
        self._close()
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._send("message_delta", delta=delta, usage=self._counts())
        self._send("message_stop")
        return self._message([part.value for part in self._parts], reason, sequence)

    def _fail(self, error: ErrorBody) -> None:
        body = anthropic_error(_STATUS_OF.get(error.type, 500), error)
        self._sent.append(b"event: error\ndata: %b\n\n" % body)

    def _stop(self) -> tuple[str, str | None]:
        if self._finish == "stop" and self._calls:
            # Chat completions say `stop` when the client has named the tool.
            return "tool_use", None
        if self._finish == "stop" and self._stopped_by in (self._request.stop_sequences or ()):
            return "stop_sequence", str(self._stopped_by)
        if self._finish == "length" and self._usage.completion_tokens < self._request.max_tokens:
            return "model_context_window_exceeded", None
        return _STOP_REASONS.get(self._finish, "end_turn"), None

    def _counts(self) -> JsonObject:
        # This API counts what was found in a cache apart, and what was put there.
        usage = self._usage
        written = usage.detail("cache_write_tokens")
        return {
            "input_tokens": usage.prompt_tokens - usage.detail("cached_tokens") - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.detail("cached_tokens"),
            "output_tokens": usage.completion_tokens,
        }

    def _message(
        self, blocks: list[JsonObject], reason: str | None, sequence: str | None
    ) -> JsonObject:
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


def _arguments(text: str) -> JsonObject:
    try:
        return msgspec.json.decode(text or "{}", type=JsonObject)
    except msgspec.DecodeError:
        return {"incomplete_json": text}
