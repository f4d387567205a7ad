"""Valid messages: requests and messages of every kind, from which fuzz begins. Pure; owns no
socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["LEADS_AWAY", "ROUTER", "Example", "asks", "of_node"]

LEADS_AWAY = frozenset({"url", "remote_host", "remote_port", "http_address", "zmq_address"})
"""Fields by which a member of the cluster may have a process dial somewhere: they are left as they
are.
"""

_CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is the tide?"}]},
        {"role": "assistant", "content": "Water.", "tool_calls": None},
        {"role": "user", "content": "And why?"},
    ],
    "max_tokens": 3,
    "stream": False,
    "seed": 4,
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }
]
_SAMPLED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "n": 2,
    "stop": ["x", "yy"],
    "stop_token_ids": [7],
    "logit_bias": {"5": 1.0},
    "min_tokens": 1,
    "ignore_eos": True,
    "priority": 0,
    "user": "u",
    "cache_salt": "s",
    "bad_words": ["no"],
    "allowed_token_ids": [5, 6, 7, 8],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 3]}},
    "required": ["a"],
    "additionalProperties": False,
}
_USAGE = {"include_usage": True}
_COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0}
_TICKET = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-1",
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "r1",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "tp_size": 1,
    "generation": "0" * 32,
    "lease_epoch": 1,
    "num_tokens": 20,
    "growing": False,
    "expires_at": 4_000_000_000,
    "signature": "0" * 64,
    "adapter": "",
    "adapter_digest": "",
    "prompt_token_ids": list(range(20, 40)),
    "generated": [9],
    "sent_text": 0,
    "seed": 1,
}


@dataclass(frozen=True, slots=True)
class Example:
    """A request over HTTP, and whose key it wants: "user", "admin", "node", or nobody's."""

    method: str
    path: str
    key: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()


def asks(key: str) -> list[Example]:
    """List what the router and a node asked directly have in common."""
    chats = [
        _CHAT,
        _CHAT | {"stream": True, "stream_options": _USAGE},
        _CHAT | _SAMPLED,
        _CHAT | {"logprobs": True, "top_logprobs": 3, "return_token_ids": True},
        _CHAT | {"tools": _TOOLS, "tool_choice": "auto"},
        _CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _SCHEMA},
            }
        },
        _CHAT | {"structured_outputs": {"regex": "[a-c]{1,3}"}},
        _CHAT | {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": True},
    ]
    completions = [
        _COMPLETION,
        _COMPLETION | {"prompt": [5, 6, 7], "echo": True, "logprobs": 2},
        _COMPLETION | {"prompt": ["a", "b"], "stream": True},
        _COMPLETION | _SAMPLED | {"prompt_logprobs": 2, "best_of": 2},
    ]
    responses = {
        "model": "tiny",
        "input": "hi",
        "max_output_tokens": 3,
        "store": True,
        "instructions": "Be brief.",
    }
    said = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    message = {
        "model": "tiny",
        "max_tokens": 3,
        "system": "x",
        "messages": [{"role": "user", "content": "hi"}],
    }
    sampling = {
        "max_tokens": 3,
        "temperature": 0.7,
        "logprobs": 2,
        "n": 2,
        "detokenize": False,
        "stop_token_ids": [7],
    }
    tokens = {
        "model": "tiny",
        "token_ids": [5, 6, 7],
        "sampling_params": sampling,
        "request_id": "r1",
        "priority": 0,
    }
    return [
        *(Example("POST", "/v1/chat/completions", key, chat) for chat in chats),
        *(Example("POST", "/v1/completions", key, completion) for completion in completions),
        Example("POST", "/v1/responses", key, responses),
        Example(
            "POST",
            "/v1/responses",
            key,
            responses | {"input": said, "previous_response_id": "resp_1"},
        ),
        Example("GET", "/v1/responses/resp_1", key),
        Example("DELETE", "/v1/responses/resp_1", key),
        Example("GET", "/v1/responses/resp_1/input_items?limit=3&order=asc&after=x", key),
        Example("POST", "/v1/messages", key, message, (("anthropic-version", "2023-06-01"),)),
        Example(
            "POST",
            "/v1/messages",
            key,
            message | {"stream": True, "tools": [{"name": "n", "input_schema": {}}]},
        ),
        Example("POST", "/v1/messages/count_tokens", key, message),
        Example("POST", "/inference/v1/generate", key, tokens),
        Example(
            "POST",
            "/inference/v1/generate",
            key,
            tokens | {"stream": True, "stream_options": _USAGE},
        ),
        Example(
            "POST", "/tokenize", key, {"model": "tiny", "prompt": "hi", "return_token_strs": True}
        ),
        Example("POST", "/tokenize", key, {"model": "tiny", "messages": _CHAT["messages"]}),
        Example("POST", "/detokenize", key, {"model": "tiny", "tokens": [5, 6]}),
        Example("POST", "/v1/load_lora_adapter", key, {"lora_name": "l", "lora_path": "/nowhere"}),
        Example("POST", "/v1/unload_lora_adapter", key, {"lora_name": "l"}),
        Example("GET", "/v1/models", key),
        Example("GET", "/v1/models/tiny", key),
        *(
            Example("GET", path, "")
            for path in ("/health", "/metrics", "/live", "/ping", "/version", "/openapi.json")
        ),
        Example("GET", "/docs", ""),
    ]


def _operators(key: str) -> list[Example]:
    orders = ("/reset_prefix_cache", "/start_profile", "/stop_profile")
    return [
        *(Example("POST", path, key) for path in orders),
        Example("GET", "/server_info?config_format=json", key),
    ]


ROUTER: list[Example] = [
    *asks("user"),
    Example("GET", "/admin/nodes", "admin"),
    Example(
        "POST",
        "/admin/nodes",
        "admin",
        {"url": "http://127.0.0.1:9", "role": "decode", "model": "tiny"},
    ),
    Example("DELETE", "/admin/nodes?url=http://127.0.0.1:9", "admin"),
    Example("POST", "/admin/drain", "admin", {"url": "http://127.0.0.1:9"}),
    Example("POST", "/admin/undrain", "admin", {"url": "http://127.0.0.1:9"}),
    Example("POST", "/admin/reload", "admin", {}),
    *_operators("admin"),
    Example("GET", "/load", "admin"),
    Example("GET", "/console", ""),
    Example("GET", "/console/app.js", ""),
    Example("GET", "/console/state?since=5", "admin"),
]
"""Every route of the router."""


def of_node(held: str) -> list[Example]:
    """Every route of a node. `held` is the id of a request whose KV it holds."""
    leg = {
        "key": "node",
        "method": "POST",
    }
    path = "/v1/completions"
    return [
        *asks("node"),
        Example(
            path=path,
            body=_COMPLETION | {"kv_transfer_params": {"do_remote_decode": True}},
            **leg,  # type: ignore[arg-type]
        ),
        Example(path=path, body=_COMPLETION | {"kv_transfer_params": _TICKET}, **leg),  # type: ignore[arg-type]
        Example(
            path=path,
            body={
                "model": "tiny",
                "max_tokens": 5,
                "kv_transfer_params": _TICKET | {"growing": True},
            },
            **leg,  # type: ignore[arg-type]
        ),
        Example("POST", "/kv/release", "node", {"request_ids": [held]}),
        Example("POST", "/kv/renew", "node", {"request_ids": [held, "b"]}),
        Example("POST", "/kv/probe/offer", "node", {"blocks": 2}),
        Example("POST", "/kv/probe/fetch", "node", {"ticket": _TICKET, "seed": 3}),
        *_operators("node"),
        Example("GET", "/load", ""),
        Example("POST", "/drain", "node"),
        Example("POST", "/undrain", "node"),
        Example("POST", "/kv/legs", "node", None, (("x-kvrelay-legs", "2"),)),
    ]
