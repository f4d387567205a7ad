"""Operators' routes, for nodes, roles, prefix caches and adapters.

router/guard.py checks who may ask. Changes are logged with their sender and may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from kvrelay.openai_api.json_body import json_response
from kvrelay.openai_api.model_types import AdapterAnswer, NodeAnswer, UnloadAdapterRequest
from kvrelay.router.guard import caller_of, peer_of
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.roles import BEGUN, ask_role
from kvrelay.router.router import Router
from kvrelay.router.serve import checked_body, read_body
from kvrelay.router.state import NodeStatus, joined_nodes, node_status
from kvrelay.router.transport.node_errors import parse_message
from kvrelay.wire.config import Role
from kvrelay.wire.errors import (
    ConfigError,
    Conflict,
    KvrelayError,
    NodeFailed,
    NotFound,
    RequestError,
    Unavailable,
)
from kvrelay.wire.frames import MALFORMED

__all__ = ["ADAPTER_PATHS", "add_admin_routes"]

ADAPTER_PATHS = _LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_RESET = "/reset_prefix_cache"
_RESET_S = 35.0
"""A little more than a node allows its engine."""
_NO_SUCH_ROUTE = (404, 405)
_TELL_DEADLINE_S = 5.0
_MAX_BODY_BYTES = 1 << 16
_READ_S = 10.0

_log = logging.getLogger("kvrelay.router")
_Body = TypeVar("_Body", bound=msgspec.Struct)


class _Name(msgspec.Struct, frozen=True):
    url: str


class _Flip(msgspec.Struct, frozen=True):
    url: str
    role: Role
    force: bool = False


class _Adapter(UnloadAdapterRequest, frozen=True):
    base_model_name: str = ""


class _Done(msgspec.Struct):
    success: bool = True


def add_admin_routes(app: FastAPI, router: Router) -> None:
    routes = _AdminRoutes(router)
    app.get("/admin/nodes", response_model=None)(routes.nodes)
    app.post("/admin/drain", response_model=None)(routes.drain)
    app.post("/admin/undrain", response_model=None)(routes.drain)
    app.post("/admin/nodes/role", response_model=None)(routes.flip)
    app.post("/admin/reload", response_model=None)(routes.reload)
    app.post(_RESET, response_model=None)(routes.reset)
    for path in ADAPTER_PATHS:
        app.post(path, response_model=None)(routes.adapters)


class _AdminRoutes:
    def __init__(self, router: Router) -> None:
        self._router, self._pool = router, router.pool

    async def nodes(self) -> Response:
        router = self._router
        own, workers = router.console.status(), router.shared.other_workers()
        return json_response({"nodes": joined_nodes(own, workers or [own])})

    async def drain(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/admin")
        begin = path == "/drain"
        node = self._known((await _order(request, _Name)).url)
        (self._pool.drain if begin else self._pool.undrain)(node, time.monotonic())
        # Other routers see it by its health; a foreign node does not know the route, and only we
        # drain it.
        status, _ = await self._router.node_client.tell(node, path, b"{}", _TELL_DEADLINE_S)
        if begin and status == 200:
            # The node says so itself from now on, and hears whoever asks it to end that.
            self._pool.undrain(node, time.monotonic())
        _note(request, "asks to %s node %s, which answers %d", path[1:], node.url, status)
        return json_response({"node_told": status == 200, "node": self._row(node)})

    async def flip(self, request: Request) -> Response:
        asked = await _order(request, _Flip)
        node = self._known(asked.url)
        if node.kind is not NodeKind.KVRELAY:
            raise RequestError(
                f"{node.url} is a {node.kind} node, whose role is given at its start", param="url"
            )
        if asked.role is not node.role and not asked.force:
            self._check_not_last(node)
        status, message = await ask_role(self._pool, self._router.node_client, node, asked.role)
        of = node.role, node.url, asked.role, status
        _note(request, "asks %s node %s to be %s: %d", *of)
        if status not in (BEGUN, 200):
            raise _not_flipped(node, status, message)
        return json_response({"node": self._row(node)})

    async def reload(self, request: Request) -> Response:
        try:
            changed = self._router.reload()
        except (ConfigError, RequestError) as why:
            _log.error("admin: the configuration is not reloaded: %s", why.message)
            raise RequestError(why.message) from why
        _note(request, "has the configuration reloaded, new: %s", ", ".join(changed) or "nothing")
        return json_response({"changed": changed})

    async def reset(self, request: Request) -> Response:
        query = request.url.query
        path, nodes = f"{_RESET}?{query}" if query else _RESET, self._pool.nodes
        said = await self._tell(nodes, path, b"", _RESET_S, self._pool.note_emptied)
        failed = ", ".join(each.url for each in said if each.status != 200) or "none"
        _note(request, "asks all nodes for %s, not done: %s", _RESET, failed)
        _check_all_done(said)
        return json_response({"success": True, "nodes": said})

    async def adapters(self, request: Request) -> Response:
        caller_of(request).check_admin()
        router, pool, path = self._router, self._pool, request.url.path
        body = await checked_body(request, router.config)
        asked = _decoded(body, _Adapter, "lora_name")

        def done(node: Node) -> None:  # not to wait for the next health check
            names, name = node.adapters, {asked.lora_name}
            changed = names | name if path == _LOAD else names - name
            pool.note_adapters(node, changed, time.monotonic())

        nodes = _nodes_for(pool, asked, loads=path == _LOAD)
        said = await self._tell(nodes, path, body, router.config.request_deadline_s, done)
        _check_all_done(said, "lora_name")
        return json_response(AdapterAnswer(asked.lora_name, "done on all nodes", said))

    async def _tell(
        self,
        nodes: Sequence[Node],
        path: str,
        body: bytes,
        deadline_s: float,
        done: Callable[[Node], None],
    ) -> list[NodeAnswer]:
        client = self._router.node_client

        async def one(node: Node) -> NodeAnswer:
            status, said = await client.call("POST", node, path, body, deadline_s)
            return _answer_of(node, status, said)

        said = await asyncio.gather(*map(one, nodes))
        for node, each in zip(nodes, said, strict=True):
            if each.status == 200 and node.wanted:  # else nobody would forget it
                done(node)
        return said

    def _row(self, node: Node) -> NodeStatus:
        return node_status(node, self._pool, time.monotonic())

    def _known(self, url: str) -> Node:
        node = self._pool.find(url)
        if node is None:
            raise NotFound(f"no node {url!r} is known; GET /admin/nodes lists them", param="url")
        return node

    def _check_not_last(self, node: Node) -> None:
        if self._pool.up(node.role, [node], node.model, NodeKind.KVRELAY):
            return
        without = {
            Role.PREFILL: "decode nodes compute all prompts",
            Role.DECODE: "nothing can be answered",
        }
        raise Conflict(
            f"{node.url} is the last {node.role} node that is up: without it {without[node.role]}; "
            "add another one first, or send force: true",
            param="force",
            code="last_of_role",
        )


def _note(request: Request, what: str, *values: object) -> None:
    _log.info("admin: %s " + what, peer_of(request), *values)


async def _order(request: Request, kind: type[_Body]) -> _Body:
    return _decoded(await read_body(request, _MAX_BODY_BYTES, _READ_S), kind)


def _decoded(body: bytes, kind: type[_Body], param: str | None = None) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as why:
        fields = param or ", ".join(kind.__struct_fields__)
        raise RequestError(
            f"the body must be a JSON object with {fields}: {why}", param=param
        ) from why


def _not_flipped(node: Node, status: int, message: str) -> KvrelayError:
    if status == Conflict.status:
        return Conflict(f"{node.url}: {message}")
    if status in _NO_SUCH_ROUTE:
        return RequestError(
            f"{node.url} is of a release whose nodes keep their role; upgrade it, or restart it"
        )
    if status == RequestError.status:
        return RequestError(f"{node.url}: {message}", param="role")
    return Unavailable(f"{node.url} answers {status}: {message}")


def _answer_of(node: Node, status: int, said: bytes | str) -> NodeAnswer:
    message = said if isinstance(said, str) else "" if status == 200 else parse_message(said)
    with contextlib.suppress(*MALFORMED):
        if status == 200 and not msgspec.json.decode(said, type=_Done).success:
            status, message = 409, "it did not succeed: some of its blocks are in use; try again"
    return NodeAnswer(node.url, node.role, status, message)


def _nodes_for(pool: Pool, asked: _Adapter, *, loads: bool) -> list[Node]:
    models = pool.models()
    base = asked.base_model_name or ("" if loads else pool.base_of(asked.lora_name))
    if not base and len(models) > 1 and loads:
        names = ", ".join(map(repr, sorted(models)))
        raise RequestError(
            f"base_model_name is missing: name one of {names}", param="base_model_name"
        )
    if base and base not in models:
        raise NotFound(
            f"model {base!r} is not served here", param="base_model_name", code="model_not_found"
        )
    return [node for node in pool.nodes if not base or node.model == base]


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
