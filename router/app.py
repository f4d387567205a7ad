"""The router as an ASGI application: its routes, and what stands before them. Decides nothing about requests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.base import RequestResponseEndpoint
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from openai_api.dialect import as_it_is
from openai_api.front import Front, front_of
from openai_api.json_body import json_response
from openai_api.routes import add_routes
from openai_api.types import ModelList
from router.adapters import LOAD_PATH, UNLOAD_PATH
from router.admin import add_admin_routes
from router.console.routes import add_console_routes
from router.guard import KeyGate, add_error_answers, answer_any, caller_of, read_body
from router.hot_routes import HotRoutes
from router.on_all_nodes import add_node_routes
from router.operators import OPERATED
from router.reload import Reread
from router.router import Router
from router.shared import Shared
from router.walk.job import (
    CHAT_PATH,
    COMPLETIONS_PATH,
)
from wire.router_config import RouterConfig

__all__ = ["create_app"]

_MAX_ADMIN_BYTES = 1 << 16
_ADMIN_READ_S = 10.0


class _App(FastAPI):
    """All routes. The hot ones need no matching, and nothing that FastAPI puts around a route."""

    hot: ASGIApp
    has_hot: Callable[[Scope], bool]
    front: Front | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.front is not None:
            entered = await self.front.enter(scope, receive, send)
            if entered is None:
                return
            send = entered
        await (self.hot(scope, receive, send) if self.has_hot(scope) else super().__call__(scope, receive, send))


def create_app(
    config: RouterConfig,
    rng: random.Random | None = None,
    shared: Shared | None = None,
    reread: Reread | None = None,
) -> FastAPI:
    """Return the router as an ASGI application. `rng` breaks ties between nodes."""
    router = Router(config, rng or random.Random(), shared, reread)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with router.running():
            yield

    app = _App(title="kvrelay router", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.router = router
    app.front = front_of(config) if router.shared.serves else None
    add_error_answers(app)
    app.add_middleware(KeyGate, keyring=router.keyring, metrics=router.metrics, admin_key=config.admin_key)

    async def complete(request: Request) -> Response:
        return await router.complete(request, as_it_is)

    hot = HotRoutes(dict.fromkeys((CHAT_PATH, COMPLETIONS_PATH), complete), answer_any)
    app.hot, app.has_hot = KeyGate(hot, router.keyring, router.metrics, config.admin_key), hot.has
    for path in (CHAT_PATH, COMPLETIONS_PATH):  # for what is not a POST
        app.post(path, response_model=None)(complete)
    add_routes(app, router, router.shared.responses, root_path=config.root_path)
    (_add_operators_routes if router.shared.forward is None else _forward_operators)(app, router)
    add_console_routes(app, router.lookout.picture, config.root_path)

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        return json_response(ModelList.of([card for card in router.models.cards() if caller_of(request).may(card.id)]))

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        caller_of(request).check_model(name)
        router.models.named(name)
        return json_response(next(card for card in router.models.cards() if card.id == name))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        status, body = router.health()
        return Response(body, status, media_type="application/json")

    return app


def _add_operators_routes(app: FastAPI, router: Router) -> None:
    """Add what operators ask and change, and what scrapers read."""
    read = partial(read_body, limit_bytes=_MAX_ADMIN_BYTES, deadline_s=_ADMIN_READ_S)
    add_admin_routes(app, router.pool, router.shared, router.legs, router.may_be_node, read, router.reload)
    add_node_routes(app, router.pool, router.shared, router.legs, lambda: router.config, router.running_now)

    @app.post(LOAD_PATH, response_model=None)
    @app.post(UNLOAD_PATH, response_model=None)
    async def adapters(request: Request) -> Response:
        return await router.tell_adapters(request)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(router.shared.exposition(router.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    if router.shared.serves:
        return

    @app.middleware("http")
    async def settle(request: Request, answer: RequestResponseEndpoint) -> Response:
        response = await answer(request)
        if request.method != "GET":
            await router.shared.settled()
        return response


def _forward_operators(app: FastAPI, router: Router) -> None:
    """Add the same routes for a process that another one answers them for."""

    async def forward(request: Request) -> Response:
        assert router.shared.forward is not None
        body = await read_body(request, router.config.max_body_bytes, _ADMIN_READ_S)
        return await router.shared.forward(request, body)

    for path in (*OPERATED, LOAD_PATH, UNLOAD_PATH, "/metrics"):
        for route in (path, path + "/{rest:path}"):
            app.add_route(route, forward, methods=["GET", "POST", "DELETE"])
