"""The admin routes: nodes are listed, added, removed, drained and given other roles.

router/guard.py checks who may ask. Changes are logged with their sender and may be repeated. They
are kept in memory only: a router that is started again knows its flags' nodes, and those that
announce themselves.
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from kvrelay.openai_api.json_body import json_response
from kvrelay.router.guard import peer_of, read_body
from kvrelay.router.nodes.members import NodeSpec, Source
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.roles import BEGUN, ask_role
from kvrelay.router.router import Router
from kvrelay.router.state import NodeStatus, joined_nodes, node_status
from kvrelay.wire.config import Role
from kvrelay.wire.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    KvrelayError,
    NotFound,
    RequestError,
    Unavailable,
)
from kvrelay.wire.frames import MALFORMED

__all__ = ["add_admin_routes"]

_NO_SUCH_ROUTE = (404, 405)
_TELL_DEADLINE_S = 5.0
_MAX_BODY_BYTES = 1 << 16
_READ_S = 10.0

_log = logging.getLogger("kvrelay.router")
_Body = TypeVar("_Body", bound=msgspec.Struct)


class _Add(msgspec.Struct, frozen=True):
    url: str
    role: Role
    model: str = ""


class _Name(msgspec.Struct, frozen=True):
    url: str


class _Flip(msgspec.Struct, frozen=True):
    url: str
    role: Role
    force: bool = False


def add_admin_routes(app: FastAPI, router: Router) -> None:
    routes = _AdminRoutes(router)
    app.get("/admin/nodes", response_model=None)(routes.nodes)
    app.post("/admin/nodes", response_model=None)(routes.add)
    app.delete("/admin/nodes", response_model=None)(routes.remove)
    app.post("/admin/drain", response_model=None)(routes.drain)
    app.post("/admin/undrain", response_model=None)(routes.drain)
    app.post("/admin/nodes/role", response_model=None)(routes.flip)
    app.post("/admin/reload", response_model=None)(routes.reload)


class _AdminRoutes:
    def __init__(self, router: Router) -> None:
        self._router, self._pool = router, router.pool

    async def nodes(self) -> Response:
        router = self._router
        own, workers = router.console.status(), router.shared.other_workers()
        rows = joined_nodes(own, workers or [own])
        if (legs := router.shared.running_elsewhere()) is not None:  # newer than what they see
            rows = [msgspec.structs.replace(row, legs=legs.get(row.url, 0)) for row in rows]
        return json_response({"nodes": rows})

    async def add(self, request: Request) -> Response:
        asked = await _decoded(request, _Add)
        spec = NodeSpec(asked.url, asked.role, asked.model)
        of = spec.role, spec.url
        if not self._router.config.may_be_node(spec.url):
            _note(request, "may not add %s node %s: node_allow does not name it", *of)
            raise Forbidden(
                f"{spec.url} would get the nodes' key and prompts, and its host is neither that of "
                "a --prefill or --decode node nor named by --node-allow; start the router with "
                "--node-allow HOST, or have the node announce itself (--router)",
                param="url",
            )
        known = self._pool.find(spec.url)
        if known is not None and known.role is not spec.role:
            raise RequestError(
                f"{spec.url} is a {known.role} node; remove it first, or correct role", param="role"
            )
        self._pool.add(spec, Source.ADMIN, time.monotonic())
        _note(request, "adds %s node %s (%s)", *of, "known" if known else "new")
        return json_response({"added": known is None, "node": self._row(self._known(spec.url))})

    async def remove(self, request: Request) -> Response:
        url = request.query_params.get("url", "").rstrip("/")
        if not url:
            raise RequestError(
                "name the node: DELETE /admin/nodes?url=http://HOST:PORT", param="url"
            )
        node = self._pool.find(url)
        self._pool.remove(url, [Source.ADMIN, Source.STATIC], time.monotonic())
        left = self._pool.sources(url)
        _note(request, "removes node %s (%s)", url, left or ("known" if node else "unknown"))
        answer: dict[str, object] = {"removed": node is not None and not left, "sources": left}
        if left:
            answer["message"] = (
                f"the node is still named by {', '.join(left)}; drain it, or stop it"
            )
        return json_response(answer)

    async def drain(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/admin")
        begin = path == "/drain"
        node = self._known((await _decoded(request, _Name)).url)
        (self._pool.drain if begin else self._pool.undrain)(node, time.monotonic())
        # Other routers see it by its health; one that is not ours does not know the route, and is
        # drained by us alone.
        status, _ = await self._router.node_client.tell(node, path, b"{}", _TELL_DEADLINE_S)
        if begin and status == 200:
            # It says so itself from now on, and whoever asks it to end that is heard by all.
            self._pool.undrain(node, time.monotonic())
        _note(request, "asks to %s node %s, which answers %d", path[1:], node.url, status)
        return json_response({"node_told": status == 200, "node": self._row(node)})

    async def flip(self, request: Request) -> Response:
        asked = await _decoded(request, _Flip)
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
        # Other routers and workers see it by its health, and all when it is over.
        return json_response({"node": self._row(node)})

    async def reload(self, request: Request) -> Response:
        try:
            changed = self._router.reload()
        except (ConfigError, RequestError) as why:
            _log.error("admin: the configuration is not reloaded: %s", why.message)
            raise RequestError(why.message) from why
        _note(request, "has the configuration reloaded, new: %s", ", ".join(changed) or "nothing")
        return json_response({"changed": changed})

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
            "add another one first, or send force: true (kvrelay role --force)",
            param="force",
            code="last_of_role",
        )


def _note(request: Request, what: str, *values: object) -> None:
    _log.info("admin: %s " + what, peer_of(request), *values)


async def _decoded(request: Request, kind: type[_Body]) -> _Body:
    body = await read_body(request, _MAX_BODY_BYTES, _READ_S)
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as why:
        fields = ", ".join(kind.__struct_fields__)
        raise RequestError(f"the body must be a JSON object with {fields}: {why}") from why


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
