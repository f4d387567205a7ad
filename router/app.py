"""The router as an ASGI application: its routes, and the key check before them."""

from __future__ import annotations

import random

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from kvrelay.openai_api.dialects.base import untranslated
from kvrelay.openai_api.json_body import json_response
from kvrelay.openai_api.model_types import model_list
from kvrelay.openai_api.routes import add_routes
from kvrelay.router.admin import ADAPTER_PATHS, add_admin_routes
from kvrelay.router.console.routes import add_console_routes
from kvrelay.router.guard import OPERATED, add_error_answers, caller_of
from kvrelay.router.request.job import CHAT_PATH, COMPLETIONS_PATH
from kvrelay.router.router import Reread, Router
from kvrelay.router.serve import RouterApp
from kvrelay.router.state import Shared
from kvrelay.wire.router_config import RouterConfig

__all__ = ["create_app"]


def create_app(
    config: RouterConfig,
    rng: random.Random | None = None,
    shared: Shared | None = None,
    reread: Reread | None = None,
) -> FastAPI:
    """Return the router as an ASGI application; `rng` breaks ties between nodes."""
    router = Router(config, rng or random.Random(), shared, reread)
    app = RouterApp(router)
    add_error_answers(app)
    forward = router.shared.forward
    if forward is None:
        add_admin_routes(app, router)

        @app.get("/metrics", response_model=None)
        async def metrics() -> Response:
            content = router.shared.exposition(router.metrics.registry)
            return Response(content, media_type=CONTENT_TYPE_LATEST)

    else:
        for path in ("/metrics", *OPERATED, "/admin/{rest:path}", *ADAPTER_PATHS):
            app.add_route(path, forward, methods=["GET"] if path == "/metrics" else ["GET", "POST"])
    add_console_routes(app, router.snapshot, config.root_path)
    if router.shared.serves:
        _add_client_routes(app, router)
    return app


def _add_client_routes(app: RouterApp, router: Router) -> None:
    async def complete(request: Request) -> Response:
        return await app.complete(request, untranslated)

    for path in (CHAT_PATH, COMPLETIONS_PATH):  # answers other methods with 405
        app.post(path, response_model=None)(complete)
    add_routes(app, app, router.shared.responses, root_path=router.config.root_path)

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        caller = caller_of(request)
        cards = [card for card in router.models.cards() if caller.may(card.id)]
        return json_response(model_list(cards))

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        caller_of(request).check_model(name)
        router.models.named(name)
        return json_response(next(card for card in router.models.cards() if card.id == name))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        status, body = router.health()
        return Response(body, status, media_type="application/json")
