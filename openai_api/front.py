"""A proxy's path prefix, and CORS, before a server's routes.

The router's answers bypass ASGI, so Starlette's CORS middleware is called, not wrapped around.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

if TYPE_CHECKING:
    from kvrelay.wire.config import NodeConfig
    from kvrelay.wire.router_config import RouterConfig

__all__ = ["CORS_HEADERS", "Front", "front_of"]

CORS_HEADERS = "kvrelay.cors"
"""Scope key of the headers for an answer past `send`."""


def front_of(config: RouterConfig | NodeConfig) -> Front | None:
    return Front(config) if config.root_path or config.allowed_origins else None


class Front:
    def __init__(self, config: RouterConfig | NodeConfig) -> None:
        self._root = config.root_path
        self._cors: CORSMiddleware | None = None
        if config.allowed_origins:
            self._cors = CORSMiddleware(
                _nowhere,
                config.allowed_origins,
                config.allowed_methods,
                config.allowed_headers,
                config.allow_credentials,
            )

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> Send | None:
        """Strip the prefix and return how to answer; None after a preflight."""
        if scope["type"] != "http":
            return send
        path = scope["path"]
        if self._root and (path == self._root or path.startswith(f"{self._root}/")):
            scope["path"] = path[len(self._root) :] or "/"
        headers = Headers(scope=scope)
        if self._cors is None or "origin" not in headers:
            return send
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._cors.preflight_response(headers)(scope, receive, send)
            return None
        cors = self._cors
        start: Message = {"type": "http.response.start"}
        await cors.send(start, _nothing, headers)
        scope[CORS_HEADERS] = start["headers"]

        async def answer(message: Message) -> None:
            await cors.send(message, send, headers)

        return answer


async def _nothing(_: Message) -> None:
    pass


async def _nowhere(_: Scope, __: Receive, ___: Send) -> None:
    raise AssertionError("the middleware is asked, not called")
