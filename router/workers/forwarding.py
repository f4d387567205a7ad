"""Requests of operators and scrapers that a worker hands on to its parent, on a Unix socket; and
the answers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import yarl
from fastapi import Request
from starlette.responses import Response

from kvrelay.router.guard import PEER_HEADER, peer_of
from kvrelay.wire.errors import Unavailable

__all__ = ["Forwarding"]

_DEADLINE_S = 320.0
"""A node may take 305 s to write a profile."""
_QUESTION_S = 20.0
_ASKED = ("authorization", "x-api-key", "content-type")
_SAID = ("content-type", "cache-control", "retry-after", "www-authenticate")


class Forwarding:
    """A connection to the parent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request, body: bytes, deadline_s: float = 0.0) -> Response:
        """Ask the parent the same, and return what it says. Raises Unavailable, after a while of
        its own by default.
        """
        if self._http is None:
            connector = aiohttp.UnixConnector(str(self._path))
            self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        deadline_s = deadline_s or (_QUESTION_S if request.method == "GET" else _DEADLINE_S)
        # As it came: what is encoded or has dots in it must not be another path there.
        path, query = (
            request.scope[part].decode("latin-1") for part in ("raw_path", "query_string")
        )
        url = yarl.URL.build(
            scheme="http", host="parent", path=path, query_string=query, encoded=True
        )
        headers = {name: request.headers[name] for name in _ASKED if name in request.headers}
        headers[PEER_HEADER] = peer_of(request)
        try:
            asking = self._http.request(request.method, url, data=body, headers=headers)
            async with asyncio.timeout(deadline_s), asking as answer:
                said = {name: answer.headers[name] for name in _SAID if name in answer.headers}
                return Response(await answer.read(), answer.status, said)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as why:
            raise Unavailable("the router's own processes have lost each other; try again") from why

    async def close(self) -> None:
        """Close the connection."""
        if self._http is not None:
            await self._http.close()
