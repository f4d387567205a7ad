"""Fake nodes that speak frames, and a router in front of them, all in one event loop on free ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvrelay.node.request_stream import KvEvents
from kvrelay.router.node_load import Share
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.request.job import Job, for_nodes, parse_body
from kvrelay.router.router import Reread, Router
from kvrelay.router.server import make_server
from kvrelay.wire.config import Role
from kvrelay.wire.errors import EngineDead, ErrorBody
from kvrelay.wire.frames import (
    LEGS_PATH,
    LEGS_VERSION_HEADER,
    Frame,
    FrameKind,
)
from kvrelay.wire.ladder import Found
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.transfer import Fingerprint, KvFacts, KvTransferParams
from kvrelay.wire.versions import LEGS
from tests.router.stream_doubles import Put, serve_stream

MODEL = "tiny"
PROMPT_IDS = [1, 2, 3]
OPERATOR = {"authorization": "Bearer operator"}
"""The admin key of the routers here, as a request has it."""
STREAM = {"stream": True}
STREAMS = pytest.mark.parametrize("stream", [True, False])


def event(text: str, finish: str | None = None) -> bytes:
    """One chat chunk as a ready SSE event."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    chunk = {
        "id": "chatcmpl-x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


KV = KvFacts(Fingerprint(1, MODEL, "float32", 16, 2, 16, 2, 0, 1), ("nixl",), "host-1", "10.0.0.1")
NO_PROMPTS = msgspec.structs.replace(KV, computes_prompts=False)
"""Of a decode node whose operator wants no prompts computed there."""

DONE = b"data: [DONE]\n\n"
WHOLE = msgspec.json.encode(
    {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc"},
                "finish_reason": "stop",
            }
        ],
    }
)

STREAMED = (event("a") + event("b") + event("c") + event("", "stop") + DONE).decode()
"""The whole answer of `prefill_ok` and `decode_ok` to a client that streams."""
ANSWERS = {True: STREAMED, False: WHOLE.decode()}
"""Whole answers, by whether the client streams."""


@dataclass
class Call:
    """A request that a fake node was sent, and its answer's frames."""

    body: dict[str, Any]
    headers: dict[str, str]
    request: web.Request
    put: Put
    begun: bool = False
    """Something was answered."""

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def params(self) -> dict[str, Any]:
        return self.body["kv_transfer_params"]

    async def send(self, *frames: Frame, load: Load | None = None) -> None:
        """Write frames, the load first."""
        begun, self.begun = self.begun, True
        await self.put(*([] if begun else [load]), *frames)

    async def tokens(self, token_id: int, text: str, sent_text: int) -> None:
        """One TOKENS frame, with bytes if the client streams."""
        payload = event(text) if self.streams else b""
        await self.send(Frame(FrameKind.TOKENS, payload, [token_id], sent_text))

    async def end(self) -> None:
        """The END frame of either kind of answer."""
        await self.send(Frame(FrameKind.END, event("", "stop") + DONE if self.streams else WHOLE))

    async def hand_over(self, **fields: Any) -> None:
        """A HANDOVER frame after one token."""
        timing = {"queue": 0.0, "prefill": 3.0}
        params = handover(self, **fields)
        await self.send(Frame(FrameKind.HANDOVER, params=params, timing=timing, found=Found()))

    def cut(self) -> None:
        """Break the connection as a killed process does."""
        assert self.request.transport is not None
        self.request.transport.abort()


def handover(call: Call, **fields: Any) -> KvTransferParams:
    """What a prefill node gives away after token 11, whose text is one character."""
    every: dict[str, Any] = {
        "do_remote_prefill": True,
        "remote_engine_id": "engine-p",
        "remote_block_ids": [[4, 5]],
        "remote_request_id": "held-1",
        "remote_host": "127.0.0.1",
        "remote_port": 7,
        "generation": "g1",
        "num_tokens": 3,
        "client_max_tokens": call.params.get("client_max_tokens", 0),
        "prompt_token_ids": PROMPT_IDS,
        "generated": [11],
        "sent_text": 1,
        "seed": call.params["seed"],
        "created": call.params["created"],
    }
    return KvTransferParams(**(every | fields))


Script = Callable[[Call], Awaitable[web.Response | None]]


async def prefill_ok(call: Call) -> None:
    """Token 11, then the hand-over."""
    await call.tokens(11, "a", 1)
    await call.hand_over()


async def decode_ok(call: Call) -> None:
    """The tokens from 11 to 13 that are not there yet, then the end."""
    for at in range(len(call.params.get("generated", [])), 3):
        await call.tokens(11 + at, "abc"[at], at + 1)
    await call.end()


async def hold(call: Call) -> None:
    """Never answer."""
    await asyncio.sleep(30)


def params_of(call: Call) -> KvTransferParams:
    """What a node was told, but for what it is to announce of the request."""
    params = msgspec.convert(call.params, KvTransferParams)
    return msgspec.structs.replace(params, tpot_ms=0.0, expected_output=0, spill=False)


def other_kind(**changes: Any) -> KvFacts:
    """KV that a node with `KV` cannot take."""
    fingerprint = msgspec.structs.replace(KV.fingerprint, kv_dtype="bfloat16")
    return msgspec.structs.replace(KV, fingerprint=fingerprint, **changes)


def parse_job(body: bytes, path: str, session: str = "", key_hash: str = "", **known: Any) -> Job:
    """A request as the router parses it."""
    job = msgspec.structs.replace(parse_body(body, path), id="id-1", created=99, **known)
    return for_nodes(job, job.model, job.priority, session, key_hash, 1234)


def error(status: int, message: str, code: str | None = None, **more: Any) -> web.Response:
    """An OpenAI-shaped error."""
    body = {"message": message, "type": "some_error", "param": "top_p", "code": code}
    return web.json_response({"error": body}, status=status, **more)


def refuse(
    status: int, message: str = "no", headers: dict[str, str] | None = None, code: str | None = None
) -> Script:
    """A script that answers with an error."""

    async def script(call: Call) -> web.Response:
        return error(status, message, code, headers=headers)

    return script


async def cut(call: Call) -> None:
    """As a killed process does, before it has answered anything."""
    call.cut()


async def cut_after_token(call: Call) -> None:
    """The same, after a token of its own."""
    at = len(call.params.get("generated", []))
    await call.tokens(11 + at, "abc"[at], at + 1)
    call.cut()


def broken(status: int) -> Script:
    """A script that ends in an ERROR frame."""

    async def script(call: Call) -> None:
        await call.send(
            Frame(FrameKind.ERROR, status=status, error=ErrorBody("it broke", "node_failed"))
        )

    return script


@dataclass
class FakeNode:
    """A node whose legs follow `script`."""

    role: str
    script: Script
    model: str = MODEL
    generation: str = "g1"
    pod_uid: str = ""
    load: Load = field(default_factory=Load)
    health_status: int = 200
    health_hangs: bool = False
    engine_dead: str = ""
    """What its health says of a dead engine."""
    kv: KvFacts | None = None
    draining: bool = False
    drain_status: int = 200
    flips_to: str | None = None
    flips: int = 0
    role_status: int = 202
    adapters: list[str] = field(default_factory=list)
    adapter_status: int = 200
    told: list[tuple[str, bytes, str]] = field(default_factory=list)
    """About adapters: path, body, authorization."""
    posts: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = field(default_factory=dict)
    """Further routes."""
    asked: list[bytes] = field(default_factory=list)
    """Bodies of /tokenize."""
    tokenizes: Callable[[], Awaitable[None]] | None = None
    """Awaited before /tokenize answers."""
    versions: tuple[int, int] = (LEGS.oldest, LEGS.newest)
    """Of the request stream."""
    asked_versions: list[str | None] = field(default_factory=list)
    """Of the streams that were opened."""
    kv_events: KvEvents | None = None
    streams: int = 0
    """That were opened."""
    stream_status: int = 200
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    resume: asyncio.Event = field(default_factory=asyncio.Event)

    async def leg_stream(self, request: web.Request) -> web.StreamResponse:
        self.streams += 1
        self.asked_versions.append(request.headers.get(LEGS_VERSION_HEADER))
        if self.stream_status != 200:
            return web.Response(status=self.stream_status)

        async def leg(body: dict[str, Any], headers: dict[str, str], put: Put) -> Any:
            return await self.called_with(Call(body, headers, request, put))

        return await serve_stream(request, leg, self.kv_events)

    async def called_with(self, call: Call) -> web.Response | None:
        if self.draining or self.flips_to:
            return error(503, "this node is draining", "draining")
        self.calls.append(call)
        try:
            return await self.script(call)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise

    async def health(self, request: web.Request) -> web.Response:
        if self.health_hangs:
            await asyncio.sleep(30)
        if self.engine_dead:
            return error(EngineDead.status, self.engine_dead, EngineDead.code)
        body = {
            "status": "draining" if self.draining else "ok",
            "role": self.role,
            "model": self.model,
            "max_model_len": 128,
            "engine_id": f"engine-{self.role}",
            "generation": self.generation,
            "load": msgspec.to_builtins(self.load),
            "adapters": self.adapters,
            "leg_stream": self.versions[0],
            "leg_stream_newest": self.versions[1],
            "pod_uid": self.pod_uid,
            "flips": self.flips,
            "flips_to": self.flips_to,
            "kv": msgspec.to_builtins(self.kv),
        }
        return web.json_response(body, status=503 if self.draining else self.health_status)

    async def drain(self, request: web.Request) -> web.Response:
        if self.drain_status == 200:
            self.draining = request.path == "/drain"
        return web.json_response({"draining": self.draining}, status=self.drain_status)

    async def change_role(self, request: web.Request) -> web.Response:
        if self.role_status != 202:
            return error(self.role_status, "it will not")
        wanted = (await request.json())["role"]
        if self.flips_to == wanted:
            return error(409, "it changes already", "flipping")
        self.flips_to = None if wanted == self.role else wanted
        return web.json_response({}, status=202 if self.flips_to else 200)

    def flipped(self) -> None:
        """It has ended what it had."""
        assert self.flips_to is not None
        self.role, self.flips_to, self.flips = self.flips_to, None, self.flips + 1
        self.script = prefill_ok if self.role == "prefill" else decode_ok

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked.append(await request.read())
        try:
            if self.tokenizes is not None:
                await self.tokenizes()
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        return web.json_response(
            {"count": 3, "max_model_len": 128, "tokens": PROMPT_IDS, "token_strs": None}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        return error(400, "no such token")

    async def adapter(self, request: web.Request) -> web.Response:
        self.told.append(
            (request.path, await request.read(), request.headers.get("authorization", ""))
        )
        if self.adapter_status == 200:
            return web.json_response({"message": "done", "lora_name": "x"})
        return error(self.adapter_status, "it will not")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeNode]:
        app = web.Application()
        app.router.add_post(LEGS_PATH, self.leg_stream)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/health", self.health)
        for path, answer in self.posts.items():
            app.router.add_post(path, answer)
        app.router.add_post("/drain", self.drain)
        app.router.add_post("/undrain", self.drain)
        app.router.add_post("/admin/role", self.change_role)
        app.router.add_post("/v1/load_lora_adapter", self.adapter)
        app.router.add_post("/v1/unload_lora_adapter", self.adapter)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def prefill(script: Script = prefill_ok, **fields: Any) -> FakeNode:
    return FakeNode("prefill", script, **fields)


def decode(script: Script = decode_ok, **fields: Any) -> FakeNode:
    return FakeNode("decode", script, **fields)


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: Any
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class Cluster:
    """A router over fake nodes, and an HTTP client for it."""

    url: str
    router: Router
    http: aiohttp.ClientSession

    def post(self, body: Any = None, path: str = "/v1/chat/completions", **kwargs: Any) -> Any:
        every = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **(body or {})}
        return self.http.post(self.url + path, json=every, **kwargs)

    async def text(self, body: Any = None, **kwargs: Any) -> str:
        """The whole text of an answer that must be 200."""
        async with self.post(body, **kwargs) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return text

    async def asked(self, *args: Any, **kwargs: Any) -> Answer:
        """Return the answer to `post`."""
        async with self.post(*args, **kwargs) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def ask(self, method: str, path: str, **kwargs: Any) -> Answer:
        """Return the answer to any request."""
        url = self.url + path
        async with self.http.request(method, url, allow_redirects=False, **kwargs) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def operate(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the answer to an operator."""
        answer = await self.ask("POST", path, json=body, headers=OPERATOR)
        return answer.status, answer.json

    def node(self, fake: FakeNode) -> Any:
        return next(node for node in self.router.pool.nodes if node.url == fake.url)

    async def all_up(self) -> None:
        await until(lambda: all(node.up for node in self.router.pool.nodes))

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series that have these labels."""
        samples = (
            sample for family in self.router.metrics.registry.collect() for sample in family.samples
        )
        return sum(
            each.value
            for each in samples
            if each.name == name and labels.items() <= each.labels.items()
        )


@asynccontextmanager
async def cluster(*nodes: FakeNode, ready: bool = True, **config: Any) -> AsyncIterator[Cluster]:
    """Start the nodes and a router over them; wait until it is ready unless told not to."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node.running())
        every: dict[str, Any] = {
            "health_interval_s": 0.05,
            "health_deadline_s": 10.0,  # noise is no fault: nodes and router share a loop
            "request_deadline_s": 60.0,
        }
        every["strict_roles"] = True  # prompts of these tests are short
        every["admin_key"] = "operator"
        settings = RouterConfig(
            prefill=tuple(node.url for node in nodes if node.role == "prefill"),
            decode=tuple(node.url for node in nodes if node.role != "prefill"),
            **(every | config),
        )
        async with router_over(settings) as started:
            if ready:
                await started.all_up()
            yield started


@asynccontextmanager
async def router_over(config: RouterConfig, reread: Reread | None = None) -> AsyncIterator[Cluster]:
    """One more router."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = make_server(config, reread=reread)
        serving = asyncio.create_task(server.serve([listening]))
        await until(lambda: server.started)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            try:
                yield Cluster(url, server.config.app.state.router, http)  # type: ignore[union-attr]
            finally:
                await http.close()
                server.should_exit = True
                await asyncio.wait_for(serving, 60)


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@contextmanager
def leg_on(pool: Pool, role: Role, exclude: Collection[Node] = ()) -> Iterator[Lease]:
    """A leg on the node of a role that has the fewest."""
    nodes = pool.up(role, exclude)
    if not nodes:
        raise pool.no_node(role)
    lease = pool.hold(min(nodes, key=lambda node: len(node.leases)), Share(), None)
    try:
        yield lease
    finally:
        pool.give_back(lease)
