"""The routes that take most of the requests, without what a framework puts around a route. Owns no route itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["HotRoutes"]


class HotRoutes:
    """An ASGI application: POSTs on a few paths. `failed` answers what is raised there."""

    def __init__(
        self,
        routes: Mapping[str, Callable[[Request], Awaitable[Response]]],
        failed: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._routes = dict(routes)
        self._failed = failed

    def has(self, scope: Scope) -> bool:
        """Whether a request is for one of them."""
        return scope["type"] == "http" and scope["path"] in self._routes and scope["method"] == "POST"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one that is."""
        request = Request(scope, receive)
        try:
            answer = await self._routes[scope["path"]](request)
        except Exception as why:  # noqa: BLE001 - the edge of a request: it must end, with an honest answer
            answer = await self._failed(request, why)
        await answer(scope, receive, send)
