"""What the bodies of other dialects have in common on their way to a chat completion. Pure and
light.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.openai_api.json_body import reading
from kvrelay.wire.errors import RequestError

__all__ = [
    "MAX_MESSAGES",
    "MAX_TOOLS",
    "PASSED_ON",
    "assistant",
    "check_messages",
    "check_tools",
    "function_tool",
    "joined_system",
    "passed_on",
    "text_of",
]

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

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

Message = dict[str, Any]


def passed_on(body: bytes) -> dict[str, Any]:
    """Find the fields of PASSED_ON that a body has, as they are. Raises RequestError."""
    with reading():
        fields = _decoder.decode(body)
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
