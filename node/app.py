"""The HTTP shell of a node: OpenAI routes, health, metrics, release of held KV.

Every answer is made of frames (wire/frames.py). A caller that asks for frames gets them; any other
gets their payloads, which are the plain OpenAI answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvrelay.node.accounts import Account
from kvrelay.node.adapter_calls import load_adapter, unload_adapter
from kvrelay.node.callers import authorize, read_body, request_id
from kvrelay.node.directly import Directly
from kvrelay.node.drain import Drain
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.error_answers import answer_errors
from kvrelay.node.joined_frames import joined_frames
from kvrelay.node.kv_events import KvEvents
from kvrelay.node.leg_stream import LegStreams, check_version
from kvrelay.node.metrics import NodeMetrics
from kvrelay.node.orders import add_orders
from kvrelay.node.plain_answers import payloads, whole
from kvrelay.node.preprocess import legs_of
from kvrelay.node.probe_calls import fetch_probe, offer_probe
from kvrelay.node.role import FLIPPING, NodeRole
from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Call, Serving
from kvrelay.openai_api.body import body_request_id
from kvrelay.openai_api.front import Front, front_of
from kvrelay.openai_api.json_body import (
    check_node_body,
    check_shape,
    json_response,
    off_loop,
    unless_disconnected,
)
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.routes import add_routes, body_excerpt
from kvrelay.openai_api.sse import joined_end
from kvrelay.openai_api.tracing import Tracing, trace_headers
from kvrelay.openai_api.types import ChatRequest, CompletionRequest, ModelList
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import (
    DeadlineExceeded,
    EngineDead,
    KvrelayError,
    NotFound,
    Overloaded,
    RequestError,
)
from kvrelay.wire.frames import (
    FRAMES_MEDIA_TYPE,
    LOAD_HEADER,
    MALFORMED,
    MAX_HANDOVER_BYTES,
    Frame,
    FrameKind,
    pack,
)
from kvrelay.wire.leg_stream import LEGS_PATH
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.versions import LEGS, RELEASE

__all__ = ["Node", "create_app", "frames_of"]

log = logging.getLogger("kvrelay.node")

MAX_QUEUED = 1024
POD_UID = "KVRELAY_POD_UID"
"""Variable from the downward API: with it a router sees that another pod has been given this
address.
"""
# The engine tells its pulse every half second; a step of the largest chunk takes a few seconds on a
# slow machine.
SILENCE_LIMIT_S = 20.0
FRESH_WITHIN_S = 0.25  # longer is not waited for an engine's numbers
_COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
_TAKEN = Frame(FrameKind.TOKENS)
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class _HeldBody(msgspec.Struct):
    request_ids: list[str]


@dataclass
class Node:
    """What the routes share. `serving` and `metrics` are None until the engine is ready."""

    config: NodeConfig
    engine: EngineClient
    created: int
    serving: Serving | None = None
    metrics: NodeMetrics | None = None
    tracing: Tracing | None = None
    kv_events: KvEvents | None = None
    failure: str | None = None
    drain: Drain = field(init=False)
    role: NodeRole = field(init=False)
    streams: LegStreams = field(default_factory=LegStreams)
    sandbox: Sandbox = field(default_factory=Sandbox)

    def __post_init__(self) -> None:
        self.drain = Drain(self.engine)
        self.role = NodeRole(self.config.role, self.engine, self.drain)

    def ready(self) -> Serving:
        """The serving half. Raises EngineDead while the engine loads and after it ended."""
        if self.engine.ended.is_set() or self.failure is not None:
            raise EngineDead(self.failure or "the engine process of this node has ended")
        if self.serving is not None and (silent_s := self.engine.silent_s()) > SILENCE_LIMIT_S:
            raise EngineDead(f"the engine process has said nothing for {silent_s:.0f} s")
        if (stopped_s := self.engine.stats.kv_silent_s) > SILENCE_LIMIT_S:
            raise EngineDead(
                f"this node hands no KV over: a thread of its KV link has stood still for "
                f"{stopped_s:.0f} s"
            )
        if self.serving is None:
            raise EngineDead("the model is still being loaded; GET /health says when it is done")
        return self.serving

    def check_open(self) -> None:
        """Raise Draining if no new leg may begin."""
        self.drain.check()
        self.role.check()

    def alive(self) -> bool:
        """Whether it serves, or may: false if only a new process can help. Loading and draining are
        no reason.
        """
        try:
            self.ready()
        except EngineDead:
            return self.serving is None and not self.engine.ended.is_set() and self.failure is None
        return True


class _App(FastAPI):
    front: Front | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.front is not None:
            entered = await self.front.enter(scope, receive, send)
            if entered is None:
                return
            send = entered
        await super().__call__(scope, receive, send)


def create_app(
    node: Node, lifespan: Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]
) -> FastAPI:
    """The routes over one node."""
    app = _App(
        title="kvrelay node", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.front = front_of(node.config)
    answer_errors(app)

    @app.post(_COMPLETIONS[0])
    async def chat(request: Request) -> Response:
        return await _complete(node, request, chat=True)

    key = partial(authorize, node.config.api_key)
    add_routes(
        app,
        Directly(
            node.ready,
            node.alive,
            node.sandbox,
            key,
            partial(_node_body, node),
            lambda req, body, chat: _complete(node, req, chat=chat, body=body),
            node.config.max_body_bytes,
        ),
        root_path=node.config.root_path,
    )

    @app.post(_COMPLETIONS[1])
    async def completions(request: Request) -> Response:
        return await _complete(node, request, chat=False)

    @app.post(LEGS_PATH)
    async def leg_stream(request: Request) -> Response:
        authorize(node.config.api_key, request)
        check_version(request.headers)
        node.ready()
        return node.streams.stream(
            partial(_streamed, node), node.config.max_body_bytes + MAX_HANDOVER_BYTES
        )

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        authorize(node.config.api_key, request)
        return json_response(ModelList.of(node.ready().cards(node.created)))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        authorize(node.config.api_key, request)
        node.ready().check_served(name)
        return json_response(
            next(card for card in node.ready().cards(node.created) if card.id == name)
        )

    @app.post("/v1/load_lora_adapter")
    async def load_lora(request: Request) -> Response:
        body = await _node_body(node, request)
        return json_response(await load_adapter(node.config, node.engine, node.ready(), body))

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora(request: Request) -> Response:
        body = await _node_body(node, request)
        return json_response(unload_adapter(node.config, node.engine, node.ready(), body))

    @app.post("/kv/release")
    async def release(request: Request) -> Response:
        request_ids = await _held_ids(node, request)
        for held in request_ids:
            node.engine.release(held)
        return json_response({"released": len(request_ids)})

    @app.post("/kv/renew")
    async def renew(request: Request) -> Response:
        request_ids = await _held_ids(node, request)
        for held in request_ids:
            node.engine.renew(held)
        return json_response({"renewed": len(request_ids)})

    @app.post("/kv/probe/offer")
    async def probe_offer(request: Request) -> Response:
        body = await _node_body(node, request)
        node.ready()
        return json_response(await offer_probe(node.role.now, node.engine, body))

    @app.post("/kv/probe/fetch")
    async def probe_fetch(request: Request) -> Response:
        body = await _node_body(node, request)
        node.ready()
        return json_response(await fetch_probe(node.role.now, node.engine, body))

    add_orders(
        app, node.config, node.engine, node.drain, node.role, node.ready, partial(_node_body, node)
    )

    @app.get("/health")
    async def health() -> Response:
        serving, draining, role = node.ready(), node.drain.begun, node.role
        return json_response(
            {
                "status": "draining" if draining else FLIPPING if role.flips_to else "ok",
                "role": role.now,
                "flips_to": role.flips_to,
                "flips": role.flips,
                "model": serving.model_name,
                "adapters": list(serving.adapters),
                "max_model_len": serving.info.max_model_len,
                "sampling_defaults": serving.defaults,
                "engine_id": serving.info.engine_id,
                "generation": serving.info.generation,
                "load": node.engine.load,
                "costs": serving.info.costs,
                "max_gap_ms": serving.info.max_gap_ms,
                "release": RELEASE,
                "leg_stream": LEGS.oldest,
                "leg_stream_newest": LEGS.newest,
                "kv": serving.info.kv,
                "kv_events": None if node.kv_events is None else node.kv_events.report(),
                "requests": node.engine.queue_depth(),
                "held_blocks": node.engine.stats.held_blocks,
                "quarantined_blocks": node.engine.stats.quarantined_blocks,
                "pod_uid": os.environ.get(POD_UID, ""),
            },
            503 if draining else 200,
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        with contextlib.suppress(EngineDead, DeadlineExceeded):
            node.ready()
            await node.engine.fresh_stats(FRESH_WITHIN_S)
        text = b"" if node.metrics is None else node.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _complete(
    node: Node, request: Request, *, chat: bool, body: bytes | None = None
) -> Response:
    """One request, from its bytes to its answer. Errors before the first token are plain HTTP
    errors.

    `body`: what the client means as a completion, if it has said it in another dialect; then it
    gets no frames.
    """
    began = time.monotonic()
    authorize(node.config.api_key, request)
    node.ready()
    node.check_open()
    wants_frames = body is None and FRAMES_MEDIA_TYPE in request.headers.get("accept", "")
    if body is None:
        body = await read_body(
            request, node.config.max_body_bytes + (MAX_HANDOVER_BYTES if wants_frames else 0)
        )
        if wants_frames:
            await off_loop(len(body), check_node_body, body, node.config.max_body_bytes)
        else:
            await off_loop(len(body), check_shape, body)
    named = request.headers.get("x-request-id") or await off_loop(len(body), body_request_id, body)
    call = Call(chat, body, request_id(named), trace_headers(request.headers.get))
    begun = await unless_disconnected(request, _begun(node, call))
    if begun is None:
        return Response(status_code=499)  # nobody is there to read it
    legs, parsed, load, frames = begun
    leg = legs[0]
    headers = {LOAD_HEADER: load.header(), "x-request-id": call.id}
    if wants_frames:
        return StreamingResponse(_packed(frames), media_type=FRAMES_MEDIA_TYPE, headers=headers)
    first = await unless_disconnected(request, anext(frames))
    if first is None:
        await frames.aclose()
        return Response(status_code=499)
    if first.kind is FrameKind.ERROR and first.error is not None:
        await frames.aclose()
        if first.status in (429, 503):
            headers["retry-after"] = str(load.retry_after_s)
        return Response(
            msgspec.json.encode({"error": first.error}), first.status, headers, "application/json"
        )
    # A caller that knows frames has the stages of all legs, and puts them into the answer itself.
    since = began if parsed.include_metrics else None
    if parsed.stream:
        events = payloads(first, frames, leg, since)
        return StreamingResponse(
            events, media_type="text/event-stream", headers=headers | SSE_HEADERS
        )
    answer = await unless_disconnected(request, whole(first, frames, leg, since))
    if answer is None:
        return Response(status_code=499)
    status, content = answer
    return Response(content, status, headers, "application/json")


async def _begun(
    node: Node, call: Call
) -> tuple[list[NodeRequest], ChatRequest | CompletionRequest, Load, AsyncGenerator[Frame, None]]:
    """A call that the engine was given: its legs, the request, the load that answers it, and the
    answer's frames.
    """
    serving = node.ready()
    node.check_open()
    if node.engine.queue_depth() >= MAX_QUEUED:
        raise Overloaded(f"{MAX_QUEUED} requests are queued on this node; try again or add nodes")
    if node.config.log_bodies:
        log.info("%s body=%s", call.response_id, body_excerpt(call.body))
    legs, parsed = await legs_of(serving, node.sandbox, call)
    frames = await frames_of(node, legs, call)
    return legs, parsed, msgspec.structs.replace(node.engine.load, leg=node.engine.legs), frames


async def _streamed(
    node: Node, path: str, headers: Mapping[str, str], body: bytes
) -> tuple[Load, AsyncGenerator[Frame, None]]:
    """A leg of a leg stream."""
    if path not in _COMPLETIONS:
        raise NotFound(f"there is no leg {path}")
    await off_loop(len(body), check_node_body, body, node.config.max_body_bytes)
    call = Call(
        path == _COMPLETIONS[0],
        body,
        request_id(headers.get("x-request-id")),
        trace_headers(headers.get),
    )
    _, _, load, frames = await _begun(node, call)
    return load, frames


async def frames_of(
    node: Node, legs: Sequence[NodeRequest], call: Call
) -> AsyncGenerator[Frame, None]:
    """Give the legs of a call to the engine, before anything else can happen, and return the frames
    of its answer.

    Legs of several prompts together are one answer's. Raises EngineDead, Overloaded.
    """
    parts = [_frames(node, leg, call) for leg in legs]
    for part in parts:
        await anext(part)
    if len(parts) == 1:
        return parts[0]
    writer = legs[0].writer
    end = partial(
        joined_end,
        include_usage=writer.include_usage,
        response_id=writer.response_id,
        created=writer.created,
        model=writer.model,
    )
    return joined_frames(parts, streams=writer.streams, end=end)


async def _frames(node: Node, leg: NodeRequest, call: Call) -> AsyncGenerator[Frame, None]:
    """Run the leg. Leaving early (the caller is gone) aborts it in the engine; errors become an
    ERROR frame.

    The first frame is none of the answer: with it the engine has the leg, and from then on a
    generator that nobody goes on with is closed when it is forgotten. Raises EngineDead, Overloaded
    before it.
    """
    deadline = asyncio.get_running_loop().time() + node.config.request_deadline_s
    updates = node.engine.start_requests(leg.submits)
    if leg.unneeded is not None:
        node.engine.give_up(leg.unneeded)
    account = Account(leg, call, node.role.now, node.metrics, node.tracing)
    error: str | None = None
    try:
        account.submitted()
        yield _TAKEN
        for opening in leg.opening_frames(node.engine.load):
            yield opening
        while not leg.done:
            # Only around the waiting: a timeout must not be left open across a yield, which may
            # resume in another task.
            async with asyncio.timeout_at(deadline):
                update, load = await updates.next()
            account.heard(update)
            for frame in leg.frames(update, load):
                yield frame
            if leg.over(update.request_id):
                updates.stop(update.request_id)
    except KvrelayError as why:
        error = why.message
        yield leg.error(why)
    except TimeoutError:
        limit = node.config.request_deadline_s
        error = f"not done within {limit:g} s"
        yield leg.error(
            DeadlineExceeded(
                f"the request was {error}; ask for fewer tokens or raise request_deadline_s"
            )
        )
    finally:
        updates.close()
        last = account.last
        if last is not None and last.held is not None and leg.finish is Finish.STOP:
            node.engine.release(last.request_id)  # a stop string ended it: no decode node will come
        account.close(error)


async def _packed(frames: AsyncGenerator[Frame, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(frames):
        async for frame in frames:
            yield pack(frame)


async def _held_ids(node: Node, request: Request) -> list[str]:
    """The requests that a router names whose KV is held here. Raises RequestError."""
    body = await _node_body(node, request)
    try:
        return msgspec.json.decode(body, type=_HeldBody).request_ids
    except MALFORMED as why:
        raise RequestError(f'the body must be {{"request_ids": [...]}}: {why}') from why


async def _node_body(node: Node, request: Request) -> bytes:
    """The body of what the cluster itself asks: from those only who know the nodes' key."""
    authorize(node.config.api_key, request)
    return await read_body(request, node.config.max_body_bytes)
