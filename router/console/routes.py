"""The routes of the console: its page, and what the page shows.

The page holds no secret and needs no key; all that it shows and does wants the admin key
(router/guard.py). Its headers keep it from loading anything from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from kvrelay.router.console.snapshot import Snapshot
from kvrelay.wire.errors import RequestError

__all__ = ["CONSOLE_PATH", "STATE_PATH", "add_console_routes"]

CONSOLE_PATH = "/console"
STATE_PATH = "/console/state"

_LATEST = 1e12
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


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def add_console_routes(app: FastAPI, snapshot: Callable[[float], Snapshot], root_path: str) -> None:
    """Add all routes; `snapshot` gets the Unix time after which requests are news."""
    files = _Files(directory=Path(__file__).parent / "static")

    async def home(_: Request) -> Response:
        return RedirectResponse(root_path + CONSOLE_PATH)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @app.get(STATE_PATH, response_model=None)
    async def state(request: Request) -> Response:
        body = msgspec.json.encode(snapshot(_since(request)))
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    app.add_route("/", home)
    app.add_route(CONSOLE_PATH, page)
    app.mount(CONSOLE_PATH, files)


def _since(request: Request) -> float:
    said = request.query_params.get("since", "0")
    try:
        since = float(said)
    except ValueError:
        since = math.inf
    if not abs(since) < _LATEST:
        raise RequestError(
            f"since must be a Unix time in seconds, got {said[:40]!r}", param="since"
        )
    return since
