"""The routes of the console: its page, and what the page shows.

The page holds no secret and needs no key; all that it shows and does wants the admin key
(router/guard.py). Its headers keep it from loading anything from elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response

from kvrelay.router.console.snapshot import Snapshot
from kvrelay.wire.errors import RequestError

__all__ = ["CONSOLE_PATH", "STATE_PATH", "add_console_routes"]

CONSOLE_PATH = "/console"
STATE_PATH = "/console/state"

_FOLDER = Path(__file__).parent / "static"
_LATEST = 1e12
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def add_console_routes(app: FastAPI, snapshot: Callable[[float], Snapshot], root_path: str) -> None:
    """Add them all. `snapshot` is asked for with the Unix time after which requests are news."""

    async def home(_: Request) -> Response:
        return RedirectResponse(root_path + CONSOLE_PATH)

    app.add_route("/", home)

    @app.get(STATE_PATH, response_model=None)
    async def state(request: Request) -> Response:
        body = msgspec.json.encode(snapshot(_since(request)))
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    # No path of a request ever names a file of the system.
    for file in (each for each in _FOLDER.iterdir() if each.suffix in _TYPES):
        app.add_route(f"{CONSOLE_PATH}/{file.name}", _serving(file))
    app.add_route(CONSOLE_PATH, _serving(_FOLDER / "index.html"))


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


def _serving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    held, kind = file.read_bytes(), _TYPES[file.suffix]
    # Asked for again each time, and answered with nothing new: a page is never older than the
    # router that serves it.
    headers = {
        **_HEADERS,
        "etag": f'"{hashlib.sha256(held).hexdigest()[:24]}"',
        "cache-control": "no-cache",
    }

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(held, headers=headers, media_type=kind)

    return serve
