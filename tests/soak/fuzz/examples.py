"""Valid messages: requests of every kind, from which fuzz begins. Pure; owns no socket.

Most are derived from the table of routes; those of which several fields belong together are written
down.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.soak.fuzz.table import ROUTES, least

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
    "seed": 4,
}
_NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 3]}}, "required": ["a"]}
_SAMPLED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 2,
    "stop": ["x", "yy"],
    "logit_bias": {"5": 1.0},
    "min_tokens": 1,
    "allowed_token_ids": [5, 6, 7, 8],
}
_CHATS: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True, "stream_options": {"include_usage": True}},
    _SAMPLED,
    {"logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    {"tools": [{"type": "function", "function": _NOW}], "tool_choice": "auto"},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": _SCHEMA},
        }
    },
    {"structured_outputs": {"regex": "[a-c]{1,3}"}},
)
_COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0}
_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": [5, 6, 7], "echo": True, "logprobs": 2},
    {"prompt": ["a", "b"], "stream": True},
    {**_SAMPLED},
)
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
    "prompt_token_ids": list(range(20, 40)),
    "generated": [9],
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
    return [
        *(Example("POST", "/v1/chat/completions", key, _CHAT | more) for more in _CHATS),
        *(Example("POST", "/v1/completions", key, _COMPLETION | more) for more in _COMPLETIONS),
        *(
            Example("POST", route.path, key, json.loads(route.body({})))
            for route in ROUTES
            if route.key == "user"
        ),
        *_gets(key, "/v1/responses/resp_1", "/v1/models", "/v1/models/tiny"),
        Example("DELETE", "/v1/responses/resp_1", key),
        *_gets("", "/health", "/metrics", "/live", "/ping", "/version", "/openapi.json", "/docs"),
    ]


def _gets(key: str, *paths: str) -> list[Example]:
    return [Example("GET", path, key) for path in paths]


def _posts(key: str, *paths: str) -> list[Example]:
    return [Example("POST", path, key) for path in paths]


def _of_fields(whose: str, key: str) -> list[Example]:
    """List a request for each field of each route that wants somebody's key."""
    return [
        Example("POST", route.path, key, json.loads(route.body({name: least(field.type, name)})))
        for route in ROUTES
        if route.key == whose
        for name, field in route.fields.items()
    ]


ROUTER: list[Example] = [
    *asks("user"),
    *_of_fields("user", "user"),
    *_of_fields("admin", "admin"),
    Example("POST", "/admin/reload", "admin", {}),
    *_posts("admin", "/reset_prefix_cache"),
    *_gets("admin", "/admin/nodes", "/console/state"),
    *_gets("", "/console", "/console/app.js"),
]
"""Every route of the router."""


def of_node(held: str) -> list[Example]:
    """Every route of a node. `held` is the id of a request whose KV it holds."""
    params: tuple[dict[str, Any], ...] = (
        {"do_remote_decode": True},
        _TICKET,
        _TICKET | {"growing": True},
    )
    return [
        *asks("node"),
        *_of_fields("user", "node"),
        *_of_fields("node", "node"),
        *(
            Example("POST", "/v1/completions", "node", _COMPLETION | {"kv_transfer_params": each})
            for each in params
        ),
        Example("POST", "/kv/renew", "node", {"request_ids": [held, "b"]}),
        *_posts("node", "/reset_prefix_cache", "/drain", "/undrain"),
        Example("POST", "/kv/legs", "node", None, (("x-kvrelay-legs", "2"),)),
    ]
