"""Operators' routes, for nodes, roles, prefix caches, adapters and metrics.

router/guard.py checks who may ask. Changes are logged with their sender and may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from kvrelay.openai_api.json_body import json_response, read_body
from kvrelay.openai_api.model_types import AdapterAnswer, NodeAnswer, UnloadAdapterRequest
from kvrelay.openai_api.routes import body_excerpt
from kvrelay.router.guard import caller_of, peer_of
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.roles import BEGUN, ask_role
from kvrelay.router.router import Router
from kvrelay.router.state import node_status
from kvrelay.router.transport.node_stream import parse_message
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, Conflict, NodeFailed, NotFound, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = ["ADAPTER_PATHS", "add_admin_routes"]

ADAPTER_PATHS = _LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_RESET = "/reset_prefix_cache"
_RESET_S = 35.0
"""A little more than a node allows its engine."""
_TELL_DEADLINE_S = 5.0
_MAX_BODY_BYTES = 1 << 16
_READ_S = 10.0

_log = logging.getLogger("kvrelay.router")
_Body = TypeVar("_Body", bound=msgspec.Struct)


class _Name(msgspec.Struct, frozen=True):
    url: str


class _Flip(_Name, frozen=True):
    role: Role
    force: bool = False


class _Adapter(UnloadAdapterRequest, frozen=True):
    base_model_name: str = ""


class _Done(msgspec.Struct):
    success: bool = True


def add_admin_routes(app: FastAPI, router: Router) -> None:
    def add(path: str, answer: Callable[[Router, Request, bytes], Awaitable[object]]) -> None:
        async def route(request: Request) -> Response:
            body = await read_body(request, _MAX_BODY_BYTES, _READ_S)
            _log.info("admin: %s asks for %s %s", peer_of(request), path, body_excerpt(body))
            try:
                return json_response(await answer(router, request, body))
            finally:
                await router.shared.settled()

        app.add_api_route(path, route, methods=["POST"], response_model=None)

    @app.get("/admin/nodes", response_model=None)
    async def nodes() -> Response:
        return json_response({"nodes": router.snapshot().nodes})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        content = router.shared.exposition(router.metrics.registry)
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    add("/admin/drain", _drain)
    add("/admin/undrain", _drain)
    add("/admin/nodes/role", _flip)
    add("/admin/reload", _reload)
    add(_RESET, _reset)
    for path in ADAPTER_PATHS:
        add(path, _adapters)


async def _drain(router: Router, request: Request, body: bytes) -> object:
    pool, path = router.pool, request.url.path.removeprefix("/admin")
    begin, node = path == "/drain", _known(pool, _order(body, _Name).url)
    (pool.drain if begin else pool.undrain)(node, time.monotonic())
    # Other routers see it by its health; a foreign node does not know the route, and only we drain
    # it.
    status, _ = await router.node_client.post(node, path, b"{}", _TELL_DEADLINE_S)
    if begin and status == 200:
        # The node says so itself from now on, and hears whoever asks it to end that.
        pool.undrain(node, time.monotonic())
    return {"node_told": status == 200, "node": node_status(node, pool, time.monotonic())}


async def _flip(router: Router, request: Request, body: bytes) -> object:
    asked, pool = _order(body, _Flip), router.pool
    node = _known(pool, asked.url)
    if node.kind is not NodeKind.KVRELAY:
        raise RequestError(
            f"{node.url} is a {node.kind} node, whose role is given at its start", param="url"
        )
    async with router.flipping:  # or two at once would each count on the other's node
        alone = not pool.up(node.role, [node], node.model, NodeKind.KVRELAY)
        if alone and asked.role is not node.role and not asked.force:
            raise Conflict(
                f"{node.url} is the last {node.role} node that is up; add another one first, or "
                "send force: true",
                param="force",
                code="last_of_role",
            )
        status, message = await ask_role(router.run_context, node, asked.role)
    if status != BEGUN:
        _check_all_done([NodeAnswer(node.url, node.role, status, message)], "role")
    return {"node": node_status(node, pool, time.monotonic())}


async def _reload(router: Router, request: Request, body: bytes) -> object:
    try:
        return {"changed": router.reload()}
    except ConfigError as why:
        raise RequestError(why.message) from why


async def _reset(router: Router, request: Request, body: bytes) -> object:
    path = f"{_RESET}?{request.url.query}&nodes=all"
    said = await _tell(router, router.pool.nodes, path, b"", _RESET_S)
    _check_all_done(said)
    return {"success": True, "nodes": said}


async def _adapters(router: Router, request: Request, body: bytes) -> object:
    caller_of(request).check_admin()
    pool, path, asked = router.pool, request.url.path, _order(body, _Adapter)
    name, nodes = asked.lora_name, _nodes_for(pool, asked, loads=path == _LOAD)
    said = await _tell(router, nodes, path, body, router.config.request_deadline_s)
    for node, each in zip(nodes, said, strict=True):  # not to wait for the next health check
        if each.status == 200 and pool.find(node.url) is node:  # else nobody would forget it
            names = node.adapters | {name} if path == _LOAD else node.adapters - {name}
            pool.note_adapters(node, names, time.monotonic())
    _check_all_done(said, "lora_name")
    return AdapterAnswer(name, "done on all nodes", said)


def _known(pool: Pool, url: str) -> Node:
    node = pool.find(url)
    if node is None:
        raise NotFound(f"no node {url!r} is known; GET /admin/nodes lists them", param="url")
    return node


def _order(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as why:
        fields = kind.__struct_fields__
        raise RequestError(
            f"the body must be a JSON object with {', '.join(fields)}: {why}", param=fields[0]
        ) from why


async def _tell(
    router: Router, nodes: Sequence[Node], path: str, body: bytes, deadline_s: float
) -> list[NodeAnswer]:
    async def one(node: Node) -> NodeAnswer:
        status, said = await router.node_client.post(node, path, body, deadline_s)
        message = "" if status == 200 else parse_message(said)
        with contextlib.suppress(*MALFORMED):
            if status == 200 and not msgspec.json.decode(said, type=_Done).success:
                status, message = (
                    409,
                    "it did not succeed: some of its blocks are in use; try again",
                )
        return NodeAnswer(node.url, node.role, status, message)

    return await asyncio.gather(*map(one, nodes))


def _nodes_for(pool: Pool, asked: _Adapter, *, loads: bool) -> list[Node]:
    base = asked.base_model_name or ("" if loads else pool.base_of(asked.lora_name))
    nodes = [node for node in pool.nodes if base in ("", node.model)]
    models = {node.model for node in nodes} - {""}
    if loads and len(models) > 1:
        names = ", ".join(map(repr, sorted(models)))
        raise RequestError(
            f"base_model_name is missing: name one of {names}", param="base_model_name"
        )
    if base and not nodes:
        raise NotFound(
            f"model {base!r} is not served here", param="base_model_name", code="model_not_found"
        )
    return nodes


def _check_all_done(said: Sequence[NodeAnswer], param: str | None = None) -> None:
    statuses = {each.status for each in said}
    if not statuses - {200}:
        return
    words = "; ".join(
        f"{each.role} node {each.url} ({each.status}): {each.message}" for each in said
    )
    if len(statuses) == 1 and 400 <= min(statuses) < 500:
        failure = RequestError(words, param=param)
        failure.status = min(statuses)
        raise failure
    done = sum(each.status == 200 for each in said)
    raise NodeFailed(f"{done} of {len(said)} nodes did it: {words}", param=param)
