"""Doubles of vLLM nodes, strict about the contract of their KV connectors: what a real one refuses
is a 400 here, and what it gets wrong silently is an assertion. They speak OpenAI's bytes as vLLM
does, and know no frames.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

MODEL = "tiny"
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The kv_transfer_params that a prefill leg carries, with toy_proxy_server.py and its like."""

PIECES = ("", "a", "b", "c")
DONE = "data: [DONE]\n\n"


def given(engine: str, request_id: str, block: int) -> dict[str, Any]:
    """What a prefill node gives away: blocks by KV group, a lease, and fields that nobody knows."""
    return middle(engine, request_id, block) | {
        "remote_block_ids": [[block, block + 1], []],
        "remote_num_tokens": 3,
        "remote_blocks_expiry_time": 12345.678901234567,
        "later": [1.0],
    }


def middle(engine: str, request_id: str, block: int) -> dict[str, Any]:
    """From vLLM 0.13 on: with the id under which the prefill node holds the blocks."""
    told = old(engine, request_id, block)
    return told | {"remote_request_id": f"chatcmpl-{request_id}-1a2b3c4d"}


def old(engine: str, _: str, block: int) -> dict[str, Any]:
    """From vLLM 0.9 on: no id of its request, one flat list of blocks."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [block, block + 1],
        "remote_engine_id": engine,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }


@dataclass
class Store:
    """KV that prefill nodes hold, by what they gave away. Read once, it is gone: blocks are freed
    after one read.
    """

    held: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def hold(self, params: dict[str, Any], request_id: str) -> None:
        self.held[json.dumps(params, sort_keys=True)] = request_id

    def fetch(self, params: dict[str, Any], request_id: str) -> str | None:
        """Why the KV cannot be had, or None."""
        key = json.dumps(params, sort_keys=True)
        if key not in self.held:
            return "these kv_transfer_params were given away by nobody"
        if self.held[key] != request_id:
            return f"X-Request-Id {request_id} is not that of the prefill leg, {self.held[key]}"
        assert key not in self.read, "KV that was read, and freed by that, is read again"
        self.read.add(key)
        return None


@dataclass
class Call:
    """One leg that a double was asked for."""

    node: VllmNode
    body: dict[str, Any]
    headers: dict[str, str]
    request: web.Request

    @property
    def chat(self) -> bool:
        return self.request.path == "/v1/chat/completions"

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    def answer(self, text: str = "abc", finish: str = "length", **fields: Any) -> dict[str, Any]:
        """A whole answer."""
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choices = [
            {"index": at, **said, "logprobs": None, "finish_reason": finish, "stop_reason": None}
            for at in range(self.body.get("n") or 1)
        ]
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": "chat.completion" if self.chat else "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": choices,
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": len(text),
                "total_tokens": 3 + len(text),
            },
            "kv_transfer_params": None,
            **fields,
        }

    def event(self, text: str, finish: str | None = None, **delta: Any) -> str:
        said: dict[str, Any] = (
            {"delta": {"content": text, **delta}} if self.chat else {"text": text}
        )
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish, "token_ids": None}
        chunk = {
            "id": f"x-{self.request_id}",
            "object": kind,
            "created": 1,
            "model": MODEL,
            "choices": [choice],
        }
        return f"data: {json.dumps(chunk)}\n\n"

    def events(self) -> list[str]:
        """A whole stream: the role, three tokens, the end, and [DONE]."""
        told = [
            self.event("", role="assistant") if self.chat else "",
            *(self.event(text) for text in PIECES[1:]),
        ]
        told.append(self.event("", "stop"))
        if (self.body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
            told.append(f"data: {json.dumps({'id': 'x', 'choices': [], 'usage': usage})}\n\n")
        return [event for event in told if event] + [DONE]

    async def stream(self, *writes: str | bytes) -> web.StreamResponse:
        """An event stream of these writes."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(self.request)
        for data in writes:
            await response.write(data.encode() if isinstance(data, str) else data)
        return response

    def cut(self) -> None:
        """Break the connection as a killed process does."""
        assert self.request.transport is not None
        self.request.transport.abort()


Script = Callable[[Call], Awaitable[web.StreamResponse | None]]


def error(status: int, message: str = "no", *, wrapped: bool = True) -> dict[str, Any]:
    """An error's body, in the newer or the older form."""
    told: dict[str, Any] = {
        "message": message,
        "type": "BadRequestError",
        "param": None,
        "code": status,
    }
    return {"error": told} if wrapped else {"object": "error", **told}


def refuse(status: int, message: str = "no", *, wrapped: bool = True) -> Script:
    async def script(call: Call) -> web.Response:
        return web.json_response(error(status, message, wrapped=wrapped), status=status)

    return script


async def cut(call: Call) -> None:
    call.cut()


async def hang(call: Call) -> None:
    await asyncio.sleep(30)


async def ok(call: Call) -> web.StreamResponse:
    """What a node of its role answers."""
    node, body = call.node, call.body
    why = node.complaint(call)
    if why is not None:
        return web.json_response(error(400, why), status=400)
    asked = body.get("kv_transfer_params") or {}
    if asked.get("do_remote_decode"):
        held = None
        if node.hands_over:
            held = node.gives(node.engine, call.request_id, 2 * len(node.store.held))
            node.store.hold(held, call.request_id)
        return web.json_response(call.answer("z", kv_transfer_params=held))
    if body.get("stream"):
        return await call.stream(*call.events())
    return web.json_response(call.answer("abc"))


@dataclass
class VllmNode:
    """A node whose legs follow `script`."""

    role: str
    script: Script
    store: Store
    engine: str = "engine-1"
    hands_over: bool = True
    gives: Callable[[str, str, int], dict[str, Any]] = given
    health_status: int = 200
    running_requests: int = 0
    waiting_requests: int = 0
    started: float = 1.7952345678e9
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)

    def complaint(self, call: Call) -> str | None:
        """Why vLLM would refuse this body, or None."""
        body = call.body
        stray = {"client_max_tokens", "pipelined", "generated"} & {
            *body,
            *(body.get("kv_transfer_params") or ()),
        }
        assert not stray, f"{stray} are no business of a vLLM node"
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if body.get("stream_options") and not body.get("stream"):
            return "Stream options can only be defined when `stream=True`."
        if limit is not None and (body.get("min_tokens") or 0) > limit:
            return f"min_tokens must be less than or equal to max_tokens={limit}"
        params = body.get("kv_transfer_params")
        if params is None:
            return None
        if params.get("do_remote_decode"):
            if self.role != "prefill":
                return "a prefill leg at a decode node"
            if params != ASKED:
                return f"kv_transfer_params of a prefill leg are {params}"
            if (
                body.get("max_tokens"),
                body.get("stream"),
                body.get("max_completion_tokens") or 1,
                body.get("ignore_eos"),
            ) != (1, False, 1, True):
                return "a prefill leg is one token, and no stream"
            return None
        if not params.get("do_remote_prefill") or self.role != "decode":
            return f"neither leg, or at the wrong node: {params}"
        return self.store.fetch(params, call.request_id)

    async def leg(self, request: web.Request) -> web.StreamResponse:
        call = Call(
            self, await request.json(), {k.lower(): v for k, v in request.headers.items()}, request
        )
        self.calls.append(call)
        self.called.set()
        try:
            return await self.script(call) or web.Response(status=500)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def say_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.25.1"})

    async def models(self, request: web.Request) -> web.Response:
        card = {
            "id": MODEL,
            "object": "model",
            "owned_by": "vllm",
            "root": MODEL,
            "parent": None,
            "max_model_len": 128,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.Response:
        text = metrics_text(self.running_requests, self.waiting_requests, self.started)
        return web.Response(text=text)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[VllmNode]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.leg)
        app.router.add_post("/v1/completions", self.leg)
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.say_version)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def metrics_text(running: int = 0, waiting: int = 0, started: float = 1.7952345678e9) -> str:
    """As vLLM's /metrics says it, the last of two engines at work; what is not about them is there too."""
    samples = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
    for engine in range(2):
        labels = f'{{engine="{engine}",model_name="a/b {{x}}"}}'
        samples += [
            f"vllm:num_requests_running{labels} {float(running * engine)}",
            f"vllm:num_requests_waiting{labels} {float(waiting * engine)}",
            f'vllm:num_requests_waiting_by_reason{{engine="{engine}",reason="capacity"}} 70.0',
        ]
    return "\n".join(
        [*samples, *([f"process_start_time_seconds {started:.10e}"] if started else []), ""]
    )


def pair(store: Store | None = None, **fields: Any) -> tuple[VllmNode, VllmNode]:
    """A prefill node and a decode node that can hand over."""
    store = store or Store()
    return VllmNode("prefill", ok, store, **fields), VllmNode("decode", ok, store, **fields)


def deltas(text: str) -> str:
    """The text of a streamed chat completion."""
    told = [
        line.removeprefix("data: ")
        for line in text.split("\n\n")
        if line and line != "data: [DONE]"
    ]
    chunks = [msgspec.json.decode(data) for data in told]
    return "".join(
        c["delta"].get("content") or "" for chunk in chunks for c in chunk.get("choices", ())
    )
