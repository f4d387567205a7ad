"""Answers: hand-written ones of chat completions, what dialects make of them, and writers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvrelay.node.app import create_app
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Node
from kvrelay.openai_api.body import decode_chat, decode_completion, sampling_params, token_limit
from kvrelay.openai_api.dialects.base import Dialect
from kvrelay.openai_api.dialects.response_store import ResponseStore
from kvrelay.openai_api.dialects.responses import translate_responses
from kvrelay.openai_api.message_stream import MessageForm, message_form
from kvrelay.openai_api.model_formats import REASONING_FORMATS, TOOL_FORMATS
from kvrelay.openai_api.tokenizer import BYTE_CHARS, Tokenizer, byte_level
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.outputs import TokenLogprobs

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 3},
}


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **choice: Any) -> bytes:
    """One chunk as an event."""
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [
            {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": finish, **choice}
        ],
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def usage_chunk() -> bytes:
    """The last chunk before [DONE]."""
    return b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ROLE = chunk({"role": "assistant", "content": ""})


def call(
    index: int, arguments: str, call_id: str | None = None, name: str | None = None
) -> dict[str, Any]:
    """A delta of a tool call: id and name in its first one."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | (
        {"id": call_id, "type": "function"} if call_id else {}
    )


TEXT = (
    ROLE
    + chunk({"content": "Hel"})
    + chunk({"content": "lo"})
    + chunk({}, "stop")
    + usage_chunk()
    + DONE
)
TOOLS = (
    ROLE
    + chunk({"reasoning": "Let me ", "reasoning_content": "Let me "})
    + chunk({"reasoning_content": "see"})
    + chunk({"content": "Looking."})
    + chunk({"tool_calls": [call(0, "", "call_a", "weather")]})
    + chunk({"tool_calls": [call(0, '{"city": ')]})
    + chunk({"tool_calls": [call(0, '"Rome"}')]})
    + chunk({"tool_calls": [call(1, '{"city": "Oslo"}', "call_b", "weather")]})
    + chunk({}, "tool_calls")
    + usage_chunk()
    + DONE
)


def whole(message: dict[str, Any], finish: str = "stop", **choice: Any) -> bytes:
    """A whole answer."""
    every = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish,
        **choice,
    }
    return json.dumps(
        {"id": "chatcmpl-1", "object": "chat.completion", "choices": [every], "usage": USAGE}
    ).encode()


WHOLE_TOOLS = whole(
    {
        "content": "Looking.",
        "reasoning_content": "Let me see",
        "tool_calls": [
            {
                "id": "call_a",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            },
            {
                "id": "call_b",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            },
        ],
    },
    "tool_calls",
)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The values of a stream whose events all have a name equal to their type; comments are
    skipped.
    """
    events = []
    for block in stream.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append(value)
    return events


async def translated(
    body: bytes,
    store: ResponseStore | None = None,
    response_id: str = "resp_1",
    max_bytes: int = 16 << 20,
) -> tuple[bytes, Dialect]:
    """A body of the Responses API as a chat completion's, and its answer's dialect."""
    names = {"owner": "me", "response_id": response_id}
    return await translate_responses(
        body, max_bytes, store=store or ResponseStore(), created_at=7, **names
    )


def with_markers(special: Sequence[str], ordinary: Sequence[str] = ()) -> Tokenizer:
    """Bytes, and markers as tokens of their own."""
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(BYTE_CHARS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(marker, normalized=False) for marker in special])
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in ordinary])
    return Tokenizer(backend, byte_level, (2,))


def asked(kind: str, fields: dict[str, Any]) -> Any:
    """A request for a chat or a completion."""
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        return decode_chat(json.dumps(body).encode())
    return decode_completion(json.dumps({"prompt": "x", "max_tokens": 500, **fields}).encode())


def answer_writer(request: Any, tokenizer: Tokenizer, **more: Any) -> AnswerWriter:
    limits = {"limit": token_limit(request, 5, 1000), "vocab_size": 300, "default_seed": 1}
    head = {"response_id": "id-1", "created": 7, "model": "m", "prompt_tokens": 5}
    params = sampling_params(request, **limits)
    return AnswerWriter(request, tokenizer, params, **head, **more)


def fed(
    writer: AnswerWriter, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], choice: int = 0
) -> bytes:
    """One token per update, as engines do, up to a stop string."""
    payload = b""
    for token, logprob in zip(ids, logprobs, strict=True):
        if not writer.choices[choice].stopped:
            payload += writer.tokens(choice, [token], [logprob])
    return payload


def formed(
    tokenizer: Tokenizer,
    prompt: str = "x",
    tool: str = "hermes",
    reasoning: str = "",
    **fields: Any,
) -> MessageForm:
    """The form of a chat's answers by the rows of these names."""
    return message_form(
        asked("chat", fields),
        tokenizer,
        tokenizer.encode(prompt, False),
        tool_format=TOOL_FORMATS.get(tool),
        reasoning=REASONING_FORMATS.get(reasoning),
    )


def node(**fields: Any) -> FastAPI:
    """The app of a node that has no engine."""
    config = NodeConfig(EngineConfig("nowhere"), **fields)
    engine = EngineClient(config)
    return create_app(Node(config, engine, created=0), lambda _: contextlib.AsyncExitStack())
