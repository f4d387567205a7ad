"""The routes of the console: its page, and what the page shows. Owns headers of both and nothing else.

The page itself holds no secret and needs no key; all that it shows and does wants the admin key (router/operators.py).
It loads nothing from anywhere else, and its headers keep it from doing so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response

from router.console.picture import Picture
from wire.errors import NotFound, RequestError

__all__ = ["CONSOLE_PATH", "STATE_PATH", "add_console_routes"]

CONSOLE_PATH = "/console"
STATE_PATH = "/console/state"

_FOLDER = Path(__file__).parent / "static"
_PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def add_console_routes(app: FastAPI, picture: Callable[[float], Picture], root_path: str) -> None:
    """Add them all. `picture` is asked for with the Unix time after which requests are news."""

    async def home(_: Request) -> Response:
        return RedirectResponse(root_path + CONSOLE_PATH)

    app.add_route("/", home)

    @app.get(CONSOLE_PATH, response_model=None)
    async def page(request: Request) -> Response:
        return _file(_PAGE, request)

    @app.get(STATE_PATH, response_model=None)
    async def state(request: Request) -> Response:
        body = msgspec.json.encode(picture(_since(request)))
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    @app.get(CONSOLE_PATH + "/{name}", response_model=None)
    async def asset(request: Request, name: str) -> Response:
        return _file(name, request)


def _since(request: Request) -> float:
    said = request.query_params.get("since", "0")
    try:
        since = float(said) if len(said) <= 32 else math.nan
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise RequestError(f"since must be a Unix time in seconds, got {said[:40]!r}", param="since")
    return since


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """By name: bytes, type and ETag. No path of a request ever names a file of the system."""
    files: dict[str, tuple[bytes, str, str]] = {}
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _TYPES:
            held = file.read_bytes()
            files[file.name] = (held, _TYPES[file.suffix], f'"{hashlib.sha256(held).hexdigest()[:24]}"')
    return files


def _file(name: str, request: Request) -> Response:
    found = _files().get(name)
    if found is None:
        raise NotFound(f"the console has no file {name[:80]!r}")
    held, kind, tag = found
    # Asked for again each time, and answered with nothing new: a page is never older than the router that serves it.
    headers = {**_HEADERS, "etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(held, headers=headers, media_type=kind)
