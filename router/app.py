"""The router as an ASGI application: its routes, and what stands before them. Decides nothing about
requests.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.openai_api.dialects.base import untranslated
from kvrelay.openai_api.front import front_of
from kvrelay.openai_api.json_body import json_response
from kvrelay.openai_api.routes import add_routes
from kvrelay.openai_api.types import ModelList
from kvrelay.router.admin import add_admin_routes
from kvrelay.router.console.routes import add_console_routes
from kvrelay.router.guard import (
    OPERATED,
    add_error_answers,
    answer_error,
    caller_of,
    check_key,
    read_body,
)
from kvrelay.router.on_all_nodes import ADAPTER_PATHS, add_node_routes
from kvrelay.router.relay import CLIENT_GONE
from kvrelay.router.reload import Reread
from kvrelay.router.request.job import CHAT_PATH, COMPLETIONS_PATH
from kvrelay.router.router import Router
from kvrelay.router.shared import Shared
from kvrelay.wire.router_config import RouterConfig

__all__ = ["create_app"]

_READ_S = 10.0


class _App(FastAPI):
    """A FastAPI of all routes. Keys are checked before, and completions need nothing that it puts
    around a route.
    """

    def __init__(self, served: Router) -> None:
        super().__init__(
            title="kvrelay router",
            lifespan=lambda _: served.running(),
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
        )
        self._served = self.state.router = served
        self.front = front_of(served.config) if served.shared.serves else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.front is not None:
            entered = await self.front.enter(scope, receive, send)
            if entered is None:
                return
            send = entered
        answer = await self._answered(scope, receive) if scope["type"] == "http" else None
        await (
            super().__call__(scope, receive, send)
            if answer is None
            else answer(scope, receive, send)
        )

    async def _answered(self, scope: Scope, receive: Receive) -> Response | None:
        """Answer a completion, and whoever has no key."""
        served = self._served
        try:
            check_key(scope, served.keyring, served.metrics, served.config.admin_key)
            if (
                served.shared.serves
                and scope["path"] in (CHAT_PATH, COMPLETIONS_PATH)
                and scope["method"] == "POST"
            ):
                return await served.complete(Request(scope, receive), untranslated)
        except Exception as why:  # noqa: BLE001 - the edge of a request: it must end, with an honest answer
            return await answer_error(Request(scope, receive), why)
        return None


def create_app(
    config: RouterConfig,
    rng: random.Random | None = None,
    shared: Shared | None = None,
    reread: Reread | None = None,
) -> FastAPI:
    """Return the router as an ASGI application. `rng` breaks ties between nodes."""
    router = Router(config, rng or random.Random(), shared, reread)
    app = _App(router)
    add_error_answers(app)

    if router.shared.forward is None:
        _add_operators_routes(app, router)
    else:
        _forward_operators(app, router, router.shared.forward)
    add_console_routes(app, router.console.snapshot, config.root_path)
    if router.shared.serves:
        _add_clients_routes(app, router)
    return app


def _add_clients_routes(app: FastAPI, router: Router) -> None:
    """Add what clients ask."""

    async def complete(request: Request) -> Response:
        return await router.complete(request, untranslated)

    for path in (CHAT_PATH, COMPLETIONS_PATH):  # for what is not a POST
        app.post(path, response_model=None)(complete)
    add_routes(app, router, router.shared.responses, root_path=router.config.root_path)

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        return json_response(
            ModelList.create(
                [card for card in router.models.cards() if caller_of(request).may(card.id)]
            )
        )

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        caller_of(request).check_model(name)
        router.models.named(name)
        return json_response(next(card for card in router.models.cards() if card.id == name))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        status, body = router.health()
        return Response(body, status, media_type="application/json")


def _add_operators_routes(app: FastAPI, router: Router) -> None:
    """Add what operators ask and change, and what scrapers read."""
    add_admin_routes(app, router)
    add_node_routes(app, router)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(
            router.shared.exposition(router.metrics.registry), media_type=CONTENT_TYPE_LATEST
        )

    if router.shared.serves:
        return

    @app.middleware("http")
    async def settle(request: Request, answer: RequestResponseEndpoint) -> Response:
        response = await answer(request)
        if request.method != "GET":
            await router.shared.settled()
        return response


def _forward_operators(
    app: FastAPI, router: Router, forward: Callable[[Request, bytes, float], Awaitable[Response]]
) -> None:
    """Add the same routes for a process that another one answers them for."""

    async def ask(request: Request) -> Response:
        return await forward(request, b"", 0.0)

    async def order(request: Request) -> Response:
        loads = request.url.path in ADAPTER_PATHS
        try:
            body = await read_body(request, router.config.max_body_bytes, _READ_S)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        return await forward(
            request, body, router.config.request_deadline_s + _READ_S if loads else 0.0
        )

    app.add_route("/metrics", ask, methods=["GET"])
    for path in (*OPERATED, "/admin/{rest:path}", *ADAPTER_PATHS):
        app.add_route(path, ask, methods=["GET"])
        app.add_route(path, order, methods=["POST", "DELETE"])
