"""The admin routes: which nodes there are; they are added, removed, drained and given other roles. For operators.

Who may ask is checked before any of them (router/operators.py). They may be repeated; what is changed is logged with
who has asked. Nothing is kept on disk: a router that is started again knows the nodes of its flags and those that
announce themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from openai_api.json_body import json_response
from router.legs.legs import Legs
from router.membership.members import NodeSpec, Source
from router.nodes.node import Node, NodeKind
from router.nodes.pool import Pool
from router.operators import peer_of
from router.shared import Shared
from router.state import node_of
from wire.config import Role
from wire.errors import ConfigError, Conflict, Forbidden, KvrelayError, NotFound, RequestError, Unavailable
from wire.frames import MALFORMED

__all__ = ["BEGUN", "add_admin_routes", "ask_role"]

BEGUN = 202
"""A node's answer when it begins to change its role."""
_NO_SUCH_ROUTE = (404, 405)
_TELL_DEADLINE_S = 5.0

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


def add_admin_routes(
    app: FastAPI,
    pool: Pool,
    shared: Shared,
    legs: Callable[[], Legs],
    may_be_node: Callable[[str], bool],
    read: Callable[[Request], Awaitable[bytes]],
    reread: Callable[[], list[str]],
) -> None:
    """Add them all. `read` gives a request's body, checked for size; `may_be_node` is RouterConfig's; `reread` takes
    the configuration over that is read again, and returns the names of the settings that are new."""
    desk = _Desk(pool, shared, legs, may_be_node, reread)

    @app.get("/admin/nodes", response_model=None)
    async def nodes(request: Request) -> Response:
        return json_response({"nodes": desk.rows()})

    @app.post("/admin/nodes", response_model=None)
    async def add(request: Request) -> Response:
        return json_response(desk.add(_decoded(await read(request), _Add), peer_of(request)))

    @app.delete("/admin/nodes", response_model=None)
    async def remove(request: Request) -> Response:
        url = request.query_params.get("url", "")
        if not url:
            raise RequestError("name the node: DELETE /admin/nodes?url=http://HOST:PORT", param="url")
        return json_response(desk.remove(url, peer_of(request)))

    @app.post("/admin/drain", response_model=None)
    @app.post("/admin/undrain", response_model=None)
    async def drain(request: Request) -> Response:
        asked = _decoded(await read(request), _Name)
        return json_response(await desk.drain(asked.url, peer_of(request), begin=request.url.path == "/admin/drain"))

    @app.post("/admin/nodes/role", response_model=None)
    async def change_role(request: Request) -> Response:
        return json_response(await desk.flip(_decoded(await read(request), _Flip), peer_of(request)))

    @app.post("/admin/reload", response_model=None)
    async def reload(request: Request) -> Response:
        return json_response(desk.reload(peer_of(request)))


async def ask_role(pool: Pool, legs: Legs, node: Node, role: Role) -> tuple[int, str]:
    """Have a node change its role, and return what it answers. From BEGUN on it takes no legs of the old one."""
    body = msgspec.json.encode({"role": role})
    status, message = await legs.tell(node, "/admin/role", body, _TELL_DEADLINE_S)
    if status == BEGUN:
        pool.flips(node, role, time.monotonic())
    return status, message


class _Desk:
    """What the routes do."""

    def __init__(
        self,
        pool: Pool,
        shared: Shared,
        legs: Callable[[], Legs],
        may_be_node: Callable[[str], bool],
        reread: Callable[[], list[str]],
    ) -> None:
        self._pool, self._shared, self._legs = pool, shared, legs
        self._may_be_node, self._reread = may_be_node, reread

    def rows(self) -> list[dict[str, Any]]:
        """Of all nodes, with the legs of all workers."""
        elsewhere = self._shared.legs_elsewhere()
        rows = [self.row(node) for node in (*self._pool.nodes, *self._pool.leaving)]
        return [row | {"legs": row["legs"] + elsewhere.get(row["url"], 0)} for row in rows]

    def row(self, node: Node) -> dict[str, Any]:
        return node_of(node, self._pool, time.monotonic())

    def add(self, asked: _Add, peer: str) -> dict[str, Any]:
        spec = NodeSpec(asked.url, asked.role, asked.model)
        if not self._may_be_node(spec.url):
            _log.warning("admin: %s may not add %s node %s: node_allow does not name it", peer, spec.role, spec.url)
            raise Forbidden(
                f"{spec.url} would get the nodes' key and prompts, and its host is neither that of a --prefill or "
                "--decode node nor named by --node-allow; start the router with --node-allow HOST, or have the node "
                "announce itself (--router)",
                param="url",
            )
        known = self._pool.find(spec.url)
        if known is not None and known.role is not spec.role:
            raise RequestError(f"{spec.url} is a {known.role} node; remove it first, or correct role", param="role")
        self._pool.add(spec, Source.ADMIN, time.monotonic())
        _log.info("admin: %s adds %s node %s (%s)", peer, spec.role, spec.url, "known" if known else "new")
        node = self._pool.find(spec.url)
        return {"added": known is None, "node": None if node is None else self.row(node)}  # None: removed meanwhile

    def remove(self, url: str, peer: str) -> dict[str, Any]:
        node = self._pool.find(url)
        url = url.rstrip("/")
        self._pool.remove(url, [Source.ADMIN, Source.STATIC], time.monotonic())
        left = self._pool.members.sources(url)
        _log.info("admin: %s removes node %s (%s)", peer, url, "unknown" if node is None else f"named by {left}")
        answer: dict[str, Any] = {"removed": node is not None and not left, "sources": left}
        if left:
            answer["message"] = f"the node is still named by {', '.join(left)}; drain it, or stop it"
        return answer

    async def drain(self, url: str, peer: str, *, begin: bool) -> dict[str, Any]:
        node = self._known(url)
        (self._pool.drain if begin else self._pool.undrain)(node, time.monotonic())
        # Other routers see it by its health; one that is not ours does not know the route, and is drained by us alone.
        path = "/drain" if begin else "/undrain"
        status, _ = await self._legs().tell(node, path, b"{}", _TELL_DEADLINE_S)
        if begin and status == 200:  # it says so itself from now on, and whoever asks it to end that is heard by all
            self._pool.undrain(node, time.monotonic())
        _log.info("admin: %s asks to %s node %s, which answers %d", peer, path[1:], node.url, status)
        return {"node_told": status == 200, "node": self.row(node)}

    async def flip(self, asked: _Flip, peer: str) -> dict[str, Any]:
        node = self._known(asked.url)
        if node.kind is not NodeKind.KVRELAY:
            raise RequestError(f"{node.url} is a {node.kind} node, whose role is given at its start", param="url")
        if asked.role is not node.role and not asked.force:
            self._check_not_last(node)
        status, message = await ask_role(self._pool, self._legs(), node, asked.role)
        _log.info("admin: %s asks %s node %s to be %s: %d", peer, node.role, node.url, asked.role, status)
        if status not in (BEGUN, 200):
            raise _not_flipped(node, status, message)
        # Other routers and workers see it by its health, and all when it is over.
        return {"node": self.row(node)}

    def _known(self, url: str) -> Node:
        node = self._pool.find(url)
        if node is None:
            raise NotFound(f"no node {url!r} is known; GET /admin/nodes lists them", param="url")
        return node

    def _check_not_last(self, node: Node) -> None:
        others = self._pool.up(node.role, [node], node.model, NodeKind.KVRELAY)
        if not others:
            effect = "nothing can be answered" if node.role is Role.DECODE else "decode nodes compute all prompts"
            raise Conflict(
                f"{node.url} is the last {node.role} node that is up: without it {effect}; add another one first, or "
                "send force: true (kvrelay role --force)",
                param="force",
                code="last_of_role",
            )

    def reload(self, peer: str) -> dict[str, Any]:
        try:
            changed = self._reread()
        except (ConfigError, RequestError) as why:
            _log.error("admin: %s asks for a reload; the configuration is not reloaded: %s", peer, why.message)
            raise RequestError(why.message) from why
        _log.info("admin: %s has the configuration reloaded, new: %s", peer, ", ".join(changed) or "nothing")
        return {"changed": changed}


def _decoded(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as why:
        fields = ", ".join(kind.__struct_fields__)
        raise RequestError(f"the body must be a JSON object with {fields}: {why}") from why


def _not_flipped(node: Node, status: int, message: str) -> KvrelayError:
    if status == Conflict.status:
        return Conflict(f"{node.url}: {message}")
    if status in _NO_SUCH_ROUTE:
        return RequestError(f"{node.url} is of a release whose nodes keep their role; upgrade it, or restart it")
    if status == RequestError.status:
        return RequestError(f"{node.url}: {message}", param="role")
    return Unavailable(f"{node.url} answers {status}: {message}")
