"""vLLM's routes for operators: asked of the router, they are asked of all nodes, and answered with what each says.

A node of vLLM is asked, too; it has some of them in its development mode only. Who may ask is checked before
(router/operators.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from openai_api.adapters import NodeSaid
from openai_api.json_body import json_response
from openai_api.server_info import server_info
from router.adapters import failure_of
from router.legs.legs import Legs, message_of
from router.nodes.node import Node
from router.nodes.pool import Pool
from router.operators import peer_of
from router.shared import Shared
from wire.frames import MALFORMED
from wire.router_config import RouterConfig

__all__ = ["add_node_routes"]

_ORDERS = {"/reset_prefix_cache": 35.0, "/start_profile": 60.0, "/stop_profile": 305.0}
"""Seconds that a node may take: a little more than it allows its engine."""
_QUESTION_S = 5.0

_log = logging.getLogger("kvrelay.router")


class _Success(msgspec.Struct):
    success: bool


def add_node_routes(
    app: FastAPI,
    pool: Pool,
    shared: Shared,
    legs: Callable[[], Legs],
    config: Callable[[], RouterConfig],
    running: Callable[[], int],
) -> None:
    """Add them all. `running`: requests of this process that are being answered."""

    async def order(request: Request) -> Response:
        path, query = request.url.path, request.url.query

        async def tell(node: Node) -> NodeSaid:
            asked = f"{path}?{query}" if query else path
            status, said = await legs().call("POST", node, asked, b"", _ORDERS[path])
            words = said if isinstance(said, str) else message_of(said) if said and status != 200 else ""
            if status == 200 and isinstance(said, bytes) and not _succeeded(said):
                status, words = 409, "it did not succeed: some of its blocks are in use; try again"
            if status == 200 and path == "/reset_prefix_cache":
                pool.note_emptied(node)
            return NodeSaid(node.url, node.role, status, words)

        said = await asyncio.gather(*map(tell, pool.nodes))
        failed = [each.url for each in said if each.status != 200]
        _log.info("admin: %s asks all nodes for %s, not done: %s", peer_of(request), path, ", ".join(failed) or "none")
        if failed:
            raise failure_of(said)
        return json_response({"success": True, "nodes": said})

    for path in _ORDERS:
        app.post(path, response_model=None)(order)

    async def told(ask: str) -> list[dict[str, Any]]:
        async def one(node: Node) -> dict[str, Any]:
            status, said = await legs().call("GET", node, ask, b"", _QUESTION_S)
            row: dict[str, Any] = {"url": node.url, "role": node.role, "status": status}
            if isinstance(said, bytes) and status == 200:
                with contextlib.suppress(*MALFORMED):
                    return row | msgspec.json.decode(said, type=dict[str, Any])
            return row | {"message": said if isinstance(said, str) else message_of(said)}

        return await asyncio.gather(*map(one, pool.nodes))

    @app.get("/server_info", response_model=None)
    async def info(request: Request) -> Response:
        as_format = request.query_params.get("config_format", "text")
        own = server_info(config(), as_format)
        return json_response(own | {"nodes": await told(f"/server_info?config_format={as_format}")})

    @app.get("/load", response_model=None)
    async def tell_load() -> Response:
        load = running() + sum(worker.running for worker in shared.seen_elsewhere())
        return json_response({"server_load": load, "nodes": await told("/load")})


def _succeeded(said: bytes) -> bool:
    """Tell whether an answer of 200 says nothing else: some of vLLM's releases have a body for it."""
    try:
        return msgspec.json.decode(said, type=_Success).success
    except MALFORMED:
        return True
