"""A node frees what it refuses by its counts: bodies are long, and the collector comes late."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from node_doubles import engine_info, serving_of
from starlette.requests import Request

from kvrelay.node.app import create_app
from kvrelay.node.lifecycle import Node
from kvrelay.node.serving import Call
from kvrelay.openai_api.types import ChatRequest, CompletionRequest
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import TransferStats
from kvrelay.wire.errors import KvrelayError
from tests.collector import left_by

GRAMMAR = {"structured_outputs": {"grammar": "[" * 40_000}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
DEADLINE_S = 20.0


class StandInEngine:
    """An engine process that is there and is asked for nothing."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.stats = SimpleNamespace(transfers=TransferStats())
        self.load = SimpleNamespace(header=lambda: "[]")

    def silent_s(self) -> float:
        return 0.0

    def queue_depth(self) -> int:
        return 0


@pytest.fixture
async def app(tmp_path: Path) -> Any:
    serving, engine = serving_of(tmp_path, engine_info(1_000_000)), cast(Any, StandInEngine())
    node = Node(NodeConfig(EngineConfig("m")), engine, 0, serving=serving)
    return create_app(node, lambda _: contextlib.AsyncExitStack())


async def asked(app: Any, path: str, body: bytes, *, goes: bool = False) -> int:
    """Ask the application, and return the status of its answer. `goes`: the client leaves when all
    is sent.
    """
    told: list[int] = []
    there, answered = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()
    if goes:
        answered.set()

    async def receive() -> dict[str, Any]:
        if there:
            return there.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])
        elif not message.get("more_body"):
            answered.set()

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("n", 1),
        "client": ("c", 2),
        "root_path": "",
    }
    async with asyncio.timeout(DEADLINE_S):
        await app(scope, receive, send)
    return told[0]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT | GRAMMAR),
        ("/v1/chat/completions", CHAT | {"model": "other"}),
        ("/v1/completions", {"prompt": "hi", "logit_bias": {"x" * 40_000: 1}}),
        ("/v1/responses", {"input": "hi"} | GRAMMAR),
        ("/v1/messages", CHAT | GRAMMAR),
        ("/tokenize", {"messages": 4, "prompt": "a" * 40_000}),
    ],
)
async def test_what_is_refused_leaves_nothing_for_the_collector(
    app: Any, path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps({"model": "m", **fields}).encode()
    assert await asked(app, path, body) in (400, 404)
    kinds = (Request, Call, ChatRequest, CompletionRequest, KvrelayError)
    assert not await left_by(kinds, lambda: asked(app, path, body))


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_a_client_that_has_gone_is_no_fault_of_the_node(app: Any, path: str) -> None:
    fields: dict[str, Any] = (
        {"tokens": [1]} if path == "/detokenize" else {"messages": CHAT["messages"] * 16_000}
    )
    assert await asked(app, path, json.dumps({"model": "m", **fields}).encode(), goes=True) in (
        200,
        499,
    )
