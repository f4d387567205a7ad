"""The routes of the console: its page, and what the page shows.

The page holds no secret and needs no key; all that it shows and does wants the admin key
(router/guard.py). Its headers keep it from loading anything from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from kvrelay.router.state import Snapshot

__all__ = ["add_console_routes"]

_PATH = "/console"

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A page is never older than its router.
    "cache-control": "no-cache",
}


def add_console_routes(app: FastAPI, snapshot: Callable[[], Snapshot], root_path: str) -> None:
    files = StaticFiles(directory=Path(__file__).parent / "static")

    async def home(_: Request) -> Response:
        return RedirectResponse(root_path + _PATH)

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        response = await files.get_response(name, request.scope)
        response.headers.update(_HEADERS)
        return response

    @app.get("/console/state", response_model=None)
    async def state() -> Response:
        body = msgspec.json.encode(snapshot())
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    app.add_route("/", home)
    app.add_route(_PATH, file)
    app.add_route(_PATH + "/{name:path}", file)
