"""`kvrelay drain` and `kvrelay role`: ask a node to drain or to change its role, and wait for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, DeadlineExceeded, KvrelayError

__all__ = ["CALL_TIMEOUT", "CallFailed", "RoleKept", "call", "change_role", "drain"]

CALL_TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=2.0)
_TICK_S = 0.2
_WHICH_KEY = (
    "; a router wants --admin-key (KVRELAY_ADMIN_KEY), a node --node-api-key (KVRELAY_NODE_API_KEY)"
)


class CallFailed(KvrelayError):
    """A node or a router cannot be reached, or refuses."""


class RoleKept(KvrelayError):
    """A node has kept its role."""


class _Node(msgspec.Struct):
    # A node's own report, or a router's row about it.
    url: str = ""
    role: Role | None = None
    flips_to: Role | None = None
    up: bool = True
    reason: str = ""
    requests: int = 0
    legs: int = 0
    held_blocks: int = 0

    @property
    def left(self) -> str:
        requests = self.requests + self.legs
        if not requests and not self.held_blocks:
            return ""
        return f"{requests} requests and {self.held_blocks} held blocks"


def drain(
    node: str, router: str, key: str, wait_s: float, console: Console, *, undo: bool = False
) -> int:
    """Drain a node and return 0 when it is idle, or with `undo` have it take requests again.

    Asks the router if one is named, else the node; `key` is that server's. Raises CallFailed, and
    DeadlineExceeded after `wait_s`.
    """
    return asyncio.run(
        _undrain(node, router, key, console) if undo else _drain(node, router, key, wait_s, console)
    )


async def _undrain(node: str, router: str, key: str, console: Console) -> int:
    async with aiohttp.ClientSession(timeout=CALL_TIMEOUT) as session:
        if router:
            await call(session, "POST", f"{router}/admin/undrain", key, {"url": node})
        else:
            await call(session, "POST", f"{node}/undrain", key, {})
    console.print(f"{node} takes requests again")
    return 0


async def _drain(node: str, router: str, key: str, wait_s: float, console: Console) -> int:
    async with aiohttp.ClientSession(timeout=CALL_TIMEOUT) as session:
        asked = ""
        if router:
            said = await call(session, "POST", f"{router}/admin/drain", key, {"url": node})
            # A node that is not ours does not know of it: only the router can say what is left.
            asked = "" if msgspec.json.decode(said)["node_told"] else router
        else:
            await call(session, "POST", f"{node}/drain", key, {})
        began, shown = time.monotonic(), None
        while True:
            found = await _look(session, node, asked, key) or _Node()
            if not found.left:
                console.print(f"{node} is drained")
                return 0
            if found.left != shown:
                console.print(f"{node} ends {found.left}")
                shown = found.left
            if time.monotonic() - began > wait_s:
                raise DeadlineExceeded(
                    f"{node} still has {found.left} after {wait_s:g} s; it goes on draining"
                )
            await asyncio.sleep(_TICK_S)


def change_role(
    node: str, router: str, key: str, role: str, wait_s: float, console: Console, *, force: bool
) -> int:
    """Change a node's role and return 0 when it serves it; `force`: also the last of its role.

    Raises ConfigError, CallFailed, RoleKept, and DeadlineExceeded after `wait_s`.
    """
    if role not in (Role.PREFILL, Role.DECODE):
        raise ConfigError(f"role must be prefill or decode, got {role!r}")
    return asyncio.run(_change_role(node, router, Role(role), key, wait_s, console, force=force))


async def _change_role(
    node: str, router: str, role: Role, key: str, wait_s: float, console: Console, *, force: bool
) -> int:
    async with aiohttp.ClientSession(timeout=CALL_TIMEOUT) as session:
        if router:
            body = {"url": node, "role": role, "force": force}
            await call(session, "POST", f"{router}/admin/nodes/role", key, body)
        else:
            await call(session, "POST", f"{node}/admin/role", key, {"role": role})
        began, told = time.monotonic(), False
        while True:
            found = await _look(session, node, router, key)
            if found is None:
                raise RoleKept(f"the router does not know {node} any more")
            if found.up and found.flips_to is None:
                if found.role is role:
                    console.print(f"{node} is a {role} node")
                    return 0
                raise RoleKept(f"{node} is a {found.role} node still: somebody has called it off")
            if not told:
                console.print(f"{node} ends what it has")
                told = True
            if time.monotonic() - began > wait_s:
                raise DeadlineExceeded(
                    f"{node} is no {role} node after {wait_s:g} s; {found.reason or 'it goes on'}"
                )
            await asyncio.sleep(_TICK_S)


async def _look(session: aiohttp.ClientSession, node: str, router: str, key: str) -> _Node | None:
    if router:
        said = await call(session, "GET", f"{router}/admin/nodes", key)
        rows = msgspec.convert(msgspec.json.decode(said)["nodes"], list[_Node])
        return next((row for row in rows if row.url == node), None)
    said = await call(session, "GET", f"{node}/health", "", draining=True)
    try:
        return msgspec.json.decode(said, type=_Node)
    except msgspec.DecodeError as why:
        raise CallFailed(f"{node} answers its health check with what is no report") from why


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    key: str,
    body: Any = None,
    *,
    draining: bool = False,
) -> bytes:
    """Return the body of an answer; with `draining` a report with status 503 is one, too.

    Raises CallFailed.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with session.request(
            method, url, json=body, headers=headers, allow_redirects=False
        ) as answer:
            said = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as why:
        raise CallFailed(f"{url} cannot be reached: {why or type(why).__name__}") from why
    if answer.status in (200, 202):
        return said
    try:
        message = msgspec.json.decode(said)["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError) as why:
        if draining and answer.status == 503:
            return said
        raise CallFailed(f"{url} answers {answer.status}") from why
    raise CallFailed(f"{url}: {message}{_WHICH_KEY if answer.status == 401 else ''}")
