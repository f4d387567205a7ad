"""What operators order of a node, over its HTTP: to drain, to take requests again, to change its role.

Owns the routes. What they set off is node/drain.py's and node/role.py's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response

from node.drain import Drain
from node.engine_client import EngineClient
from node.role import NodeRole
from openai_api.json_body import json_response
from wire.config import Role
from wire.errors import RequestError
from wire.frames import MALFORMED

__all__ = ["add_orders"]


class _Wanted(msgspec.Struct):
    role: Role


def add_orders(
    app: FastAPI,
    engine: EngineClient,
    drain: Drain,
    role: NodeRole,
    ready: Callable[[], object],
    read: Callable[[Request], Awaitable[bytes]],
) -> None:
    """Add them all. `ready` raises EngineDead before the node serves; `read` gives the body of one who may ask."""

    @app.post("/drain")
    @app.post("/undrain")
    async def change_drain(request: Request) -> Response:
        await read(request)
        drain.end() if request.url.path == "/undrain" else drain.begin()
        return json_response({"draining": drain.begun, "requests": engine.queue_depth()})

    @app.post("/admin/role")
    async def change_role(request: Request) -> Response:
        body = await read(request)
        ready()
        try:
            wanted = msgspec.json.decode(body, type=_Wanted).role
        except MALFORMED as why:
            raise RequestError(f'the body must be {{"role": "prefill"}} or {{"role": "decode"}}: {why}') from why
        role.ask(wanted)
        told = {"role": role.now, "flips_to": role.flips_to, "requests": engine.queue_depth()}
        return json_response(told, 200 if role.flips_to is None else 202)
