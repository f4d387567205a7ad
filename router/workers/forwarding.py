"""Requests of operators and scrapers that a worker hands on to its parent, on a Unix socket; and the answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from fastapi import Request
from starlette.responses import Response

from router.guard import PEER_HEADER, peer_of
from wire.errors import Unavailable

__all__ = ["Forwarding"]

_DEADLINE_S = 320.0
"""The longest that the parent may take: a node may take 305 s to write a profile."""
_ASKED = ("authorization", "x-api-key", "content-type")
_SAID = ("content-type", "cache-control", "retry-after", "www-authenticate")


class Forwarding:
    """A connection to the parent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request, body: bytes) -> Response:
        """Ask the parent the same, and return what it says. Raises Unavailable."""
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self._path)))
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: request.headers[name] for name in _ASKED if name in request.headers}
        headers[PEER_HEADER] = peer_of(request)
        try:
            asking = self._http.request(request.method, f"http://parent{path}", data=body, headers=headers)
            async with asyncio.timeout(_DEADLINE_S), asking as answer:
                said = {name: answer.headers[name] for name in _SAID if name in answer.headers}
                return Response(await answer.read(), answer.status, said)
        except (aiohttp.ClientError, OSError, TimeoutError) as why:
            raise Unavailable("the router's own processes have lost each other; try again") from why

    async def close(self) -> None:
        """Close the connection."""
        if self._http is not None:
            await self._http.close()
