"""HTTP app of a node: completions, models, health and metrics."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import cast

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from kvrelay.node.admin_routes import add_admin_routes
from kvrelay.node.completions import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    complete,
    read_request,
    start_streamed,
)
from kvrelay.node.http_edge import ERRORS, answer_error, authorize
from kvrelay.node.lifecycle import FLIPPING, Node
from kvrelay.node.preprocess import detokenize, tokenize
from kvrelay.node.request_stream import check_version
from kvrelay.openai_api.dialects.base import Dialect, Translate
from kvrelay.openai_api.front import Front, front_of
from kvrelay.openai_api.json_body import (
    json_response,
    off_loop,
    unless_disconnected,
)
from kvrelay.openai_api.model_types import model_list
from kvrelay.openai_api.routes import add_routes
from kvrelay.wire.errors import (
    DeadlineExceeded,
    EngineDead,
    ErrorBody,
    NodeFailed,
    RequestError,
)
from kvrelay.wire.frames import LEGS_PATH, MAX_HANDOVER_BYTES
from kvrelay.wire.versions import LEGS, RELEASE

__all__ = ["create_app"]

POD_UID = "KVRELAY_POD_UID"
"""Variable of the downward API, by which a router sees that another pod got this address."""
_STATS_DEADLINE_S = 0.25  # a scrape gets the last report instead


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
    app = _App(
        title="kvrelay node", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.front = front_of(node.config)
    for kind in ERRORS:
        app.add_exception_handler(kind, answer_error)

    @app.post(CHAT_PATH)
    @app.post(COMPLETIONS_PATH)
    async def completions(request: Request) -> Response:
        body, chat = await read_request(node, request), request.url.path.endswith(CHAT_PATH)
        return await complete(node, request, body, chat=chat)

    @app.post(LEGS_PATH)
    async def request_stream(request: Request) -> Response:
        authorize(node.config.api_key, request)
        check_version(request.headers)
        node.ready()
        max_body_bytes = node.config.max_body_bytes + MAX_HANDOVER_BYTES
        return node.streams.open(partial(start_streamed, node), max_body_bytes)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        authorize(node.config.api_key, request)
        return json_response(model_list(node.ready().cards(node.created)))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        authorize(node.config.api_key, request)
        node.ready().check_served(name)
        cards = node.ready().cards(node.created)
        return json_response(next(card for card in cards if card.id == name))

    @app.get("/health")
    async def health() -> Response:
        return json_response(_health(node), 503 if node.draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        with contextlib.suppress(EngineDead, DeadlineExceeded):
            node.ready()
            await node.engine.fresh_stats(_STATS_DEADLINE_S)
        text = b"" if node.metrics is None else node.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    add_routes(app, DialectServer(node), root_path=node.config.root_path)
    add_admin_routes(app, node)
    return app


def _health(node: Node) -> dict[str, object]:
    serving, stats = node.ready(), node.engine.stats
    info = serving.info
    status = "draining" if node.draining else FLIPPING if node.flips_to else "ok"
    return {
        "status": status,
        "role": node.role,
        "flips_to": node.flips_to,
        "flips": node.flips,
        "model": serving.model_name,
        "adapters": list(serving.adapters),
        "max_model_len": info.max_model_len,
        "sampling_defaults": serving.defaults,
        "engine_id": info.engine_id,
        "generation": info.generation,
        "load": node.engine.load,
        "costs": info.costs,
        "max_gap_ms": info.max_gap_ms,
        "release": RELEASE,
        "leg_stream": LEGS.oldest,
        "leg_stream_newest": LEGS.newest,
        "kv": info.kv and replace(info.kv, cache=node.cache.source),
        "requests": node.engine.queue_depth(),
        "held_blocks": stats.held_blocks,
        "quarantined_blocks": stats.quarantined_blocks,
        "pod_uid": os.environ.get(POD_UID, ""),
    }


class _ErrorAnswer(msgspec.Struct):
    error: ErrorBody


class DialectServer:
    def __init__(self, node: Node) -> None:
        self._node = node

    def check_key(self, request: Request) -> None:
        authorize(self._node.config.api_key, request)

    def owner(self, request: Request) -> str:
        return ""  # a node has one key, so all responses have one owner

    def alive(self) -> bool:
        return self._node.alive()

    def healthy(self) -> bool:
        with contextlib.suppress(EngineDead):
            self._node.ready()
            return True
        return False

    def served(self) -> list[str]:
        with contextlib.suppress(EngineDead):
            serving = self._node.ready()
            return [serving.model_name, *serving.adapters]
        return []

    async def complete(self, request: Request, translate: Translate) -> Response:
        body = await read_request(self._node, request)
        body, dialect = await translate(body, self._node.config.max_body_bytes)
        try:
            answer = await complete(self._node, request, body, chat=True)
        except RequestError as why:  # of a field by its name in a completion
            return Response(
                dialect.error(why.status, why.body()), why.status, media_type="application/json"
            )
        return _translate(answer, dialect)

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        body = await read_request(self._node, request)
        serving, body = self._node.ready(), await off_loop(len(body), translate, body)
        if path == "/tokenize":
            return await unless_disconnected(request, tokenize(serving, self._node.sandbox, body))
        return await unless_disconnected(request, detokenize(serving, body))


def _translate(answer: Response, dialect: Dialect) -> Response:
    if isinstance(answer, StreamingResponse):
        chunks = cast("AsyncGenerator[bytes, None]", answer.body_iterator)
        answer.body_iterator = _events(chunks, dialect)
        return answer
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in ("content-length", "content-type")
    }
    status, body = answer.status_code, bytes(answer.body)
    try:
        if status == 200:
            body = dialect.whole(body)
        elif body:
            body = dialect.error(status, msgspec.json.decode(body, type=_ErrorAnswer).error)
    except NodeFailed as why:
        status, body = why.status, dialect.error(why.status, why.body())
    return Response(body, status, headers, "application/json")


async def _events(chunks: AsyncGenerator[bytes, None], dialect: Dialect) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield dialect.events(chunk)
