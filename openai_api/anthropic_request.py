"""POST /v1/messages of the Anthropic API: its body, checked, and the chat completion that it means.
Pure and light.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.openai_api.chat_fields import (
    assistant,
    check_messages,
    check_tools,
    function_tool,
    joined_system,
    passed_on,
    text_of,
)
from kvrelay.openai_api.json_body import reading
from kvrelay.wire.errors import RequestError

__all__ = [
    "CountRequest",
    "MessagesRequest",
    "OutputConfig",
    "Thinking",
    "Turn",
    "chat_body",
    "count_body",
    "decode_messages",
]

Block = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Turn(msgspec.Struct, frozen=True):
    """What one side has said."""

    role: str
    content: str | list[Block]


class Thinking(msgspec.Struct, frozen=True):
    """`type`: enabled, adaptive or disabled. The budget is not enforced: max_tokens counts thinking
    too.
    """

    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """`format`: {"type": "json_schema", "schema": ...}."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: all that is a part of the prompt."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Block] | None = None
    tool_choice: Block | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages. Fields of chat_fields.PASSED_ON are taken beside these."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None


_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


def decode_messages(body: bytes) -> MessagesRequest:
    """The request in `body`. Raises RequestError."""
    with reading():
        request = _decoder.decode(body)
    if request.max_tokens < 1:
        raise RequestError(
            f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens"
        )
    if request.container is not None or request.mcp_servers:
        name = "mcp_servers" if request.mcp_servers else "container"
        raise RequestError(f"{name} is not supported; tools run at the client", param=name)
    return request


def chat_body(request: MessagesRequest, body: bytes) -> bytes:
    """The chat completion that `request` means; `body` is its own, for the fields passed on. Raises
    RequestError.
    """
    user = (request.metadata or {}).get("user_id")
    stream = {"include_usage": True, "continuous_usage_stats": True} if request.stream else None
    every: dict[str, Any] = {
        **_prompt(request),
        **passed_on(body),
        **_thinking(request.thinking, passed_on(body)),
        "max_completion_tokens": request.max_tokens,
        "fit_max_tokens": True,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "stream_options": stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "user": user if isinstance(user, str) else None,
        "response_format": _response_format(request.output_config),
        "reasoning_effort": request.output_config.effort if request.output_config else None,
    }
    return _encode({name: value for name, value in every.items() if value is not None})


def count_body(body: bytes) -> bytes:
    """The body of POST /tokenize that counts what a count_tokens request asks for. Raises
    RequestError.
    """
    with reading():
        request = _count_decoder.decode(body)
    every = {**_prompt(request), **_thinking(request.thinking, {})}
    return _encode({name: value for name, value in every.items() if value is not None})


def _prompt(request: CountRequest) -> dict[str, Any]:
    """The chat fields that make the prompt."""
    check_tools(request.tools)
    check_messages(request.messages)
    system = text_of(request.system, ("text",), "system")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for at, message in enumerate(request.messages):
        _add(messages, message, at)
    if not request.messages:
        raise RequestError("messages must not be empty", param="messages")
    # An answer that the client has begun is gone on with, not begun anew.
    begun = {"continue_final_message": True, "add_generation_prompt": False}
    last = messages[-1]
    goes_on = last["role"] == "assistant" and "tool_calls" not in last
    return {
        "model": request.model,
        "messages": joined_system(messages),
        **(begun if goes_on else {}),
        **_tools(request),
    }


def _add(messages: list[dict[str, Any]], message: Turn, at: int) -> None:
    where = f"messages[{at}].content"
    if message.role not in ("user", "assistant", "system"):
        raise RequestError(
            f"messages[{at}].role must be user, assistant or system, got {message.role!r}",
            param=f"messages[{at}].role",
        )
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
                pass  # of another server's model, which alone can read it
            case _:
                raise RequestError(
                    f"{place} is a block of type {block.get('type')!r} that a {message.role} "
                    f"message cannot have here; "
                    "text, tool_use, tool_result and thinking blocks are served",
                    param=place,
                )
    if message.role == "assistant":
        assistant(messages)["content"] = "\n".join(texts) if texts else None
    elif texts:
        messages.append({"role": message.role, "content": "\n".join(texts)})
    elif not message.content:
        raise RequestError(f"{where} must not be empty", param=where)


def _tools(request: CountRequest) -> dict[str, Any]:
    """The chat fields of tools."""
    if not request.tools:
        return {}
    tools: list[dict[str, Any]] = []
    for at, tool in enumerate(request.tools):
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"tools[{at}] is of type {tool.get('type')!r}; only custom tools are served, "
                f"which the client runs",
                param=f"tools[{at}].type",
                code="unsupported_parameter",
            )
        tools.append(function_tool(tool, "input_schema", f"tools[{at}]"))
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


def _thinking(thinking: Thinking | None, given: dict[str, Any]) -> dict[str, Any]:
    """Templates of models that can think or not ask for `enable_thinking`; others do not look at
    it.
    """
    if thinking is None or "chat_template_kwargs" in given:
        return {}
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        raise RequestError(
            f"thinking.type must be enabled, adaptive or disabled, got {thinking.type!r}",
            param="thinking.type",
        )
    return {"chat_template_kwargs": {"enable_thinking": thinking.type != "disabled"}}


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    match config.format if config else None:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        case _:
            raise RequestError(
                'output_config.format must be {"type": "json_schema", "schema": {...}}',
                param="output_config.format",
            )
