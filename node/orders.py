"""What operators order and ask of a node, over its HTTP: to drain, to change its role, and vLLM's
routes for them.

Owns the routes. What they set off is node/drain.py's, node/role.py's and the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response

from kvrelay.node.drain import Drain
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.role import NodeRole
from kvrelay.openai_api.json_body import json_response
from kvrelay.openai_api.routes import server_info
from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.errors import NotFound, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = ["add_orders"]

_RESET_DEADLINE_S = 30.0  # a step that has begun ends first
_PROFILE_DEADLINE_S = 300.0

log = logging.getLogger("kvrelay.node")


class _Wanted(msgspec.Struct):
    role: Role


def add_orders(
    app: FastAPI,
    config: NodeConfig,
    engine: EngineClient,
    drain: Drain,
    role: NodeRole,
    ready: Callable[[], object],
    read: Callable[[Request], Awaitable[bytes]],
) -> None:
    """Add them all. `ready` raises EngineDead before the node serves; `read` gives the body of one
    who may ask.
    """

    @app.post("/drain")
    @app.post("/undrain")
    async def change_drain(request: Request) -> Response:
        await read(request)
        drain.end() if request.url.path == "/undrain" else drain.begin()
        return json_response({"draining": drain.begun, "requests": engine.queue_depth()})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        await read(request)
        ready()
        await engine.reset_prefix_cache(_RESET_DEADLINE_S)
        log.info("the prefix cache is reset")
        return json_response({"success": True})

    @app.post("/start_profile")
    @app.post("/stop_profile")
    async def profile(request: Request) -> Response:
        await read(request)
        ready()
        if config.profiler_config is None:
            raise NotFound("this node has no profiler; start it with --profiler-config")
        await engine.profile(
            begin=request.url.path == "/start_profile", deadline_s=_PROFILE_DEADLINE_S
        )
        return Response()

    @app.get("/server_info")
    async def tell_server(request: Request) -> Response:
        await read(request)
        return json_response(server_info(config, request.query_params.get("config_format", "text")))

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": engine.queue_depth()})

    @app.post("/admin/role")
    async def change_role(request: Request) -> Response:
        body = await read(request)
        ready()
        try:
            wanted = msgspec.json.decode(body, type=_Wanted).role
        except MALFORMED as why:
            raise RequestError(
                f'the body must be {{"role": "prefill"}} or {{"role": "decode"}}: {why}'
            ) from why
        role.ask(wanted)
        told = {"role": role.now, "flips_to": role.flips_to, "requests": engine.queue_depth()}
        return json_response(told, 200 if role.flips_to is None else 202)
