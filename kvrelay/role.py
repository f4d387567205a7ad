"""`kvrelay role`: asks a node to be a prefill or a decode node from now on, and waits until it is.

Owns the calls and what is printed; what the node does is node/lifecycle.py's, what the router makes of
it router/nodes/pool.py's.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
import msgspec
from rich.console import Console

from kvrelay.drain import CALL, Refusal, addresses, call
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, DeadlineExceeded, KvrelayError

__all__ = ["RoleKept", "run"]

_TICK_S = 0.2


class RoleKept(KvrelayError):
    """The node has kept its role."""


class _Seen(msgspec.Struct):
    role: Role
    url: str = ""
    flips_to: Role | None = None
    up: bool = True
    reason: str = ""


class _Rows(msgspec.Struct):
    nodes: list[_Seen]


def run(
    node: str,
    role: str,
    router: str,
    admin_key: str,
    node_api_key: str,
    wait_s: float,
    console: Console,
    *,
    force: bool,
) -> int:
    """The command: 0 when the node serves the role. `force`: also if it is the last one of its own.

    Raises ConfigError, DrainFailed if it is refused, RoleKept, DeadlineExceeded after `wait_s`."""
    at = addresses(node, router)
    if role not in (Role.PREFILL, Role.DECODE):
        raise ConfigError(f"role must be prefill or decode, got {role!r}")
    key = admin_key if router else node_api_key
    return asyncio.run(_change(*at, Role(role), key, wait_s, console, force=force))


async def _change(
    node: str, router: str, role: Role, key: str, wait_s: float, console: Console, *, force: bool
) -> int:
    async with aiohttp.ClientSession(timeout=CALL) as session:
        if router:
            await call(
                session,
                "POST",
                f"{router}/admin/nodes/role",
                key,
                {"url": node, "role": role, "force": force},
            )
        else:
            await call(session, "POST", f"{node}/admin/role", key, {"role": role})
        began, told = time.monotonic(), False
        while True:
            seen = await _look(session, node, router, key)
            if seen.role is role and seen.up and seen.flips_to is None:
                console.print(f"{node} is a {role} node")
                return 0
            if seen.up and seen.flips_to is None:
                raise RoleKept(f"{node} is a {seen.role} node still: somebody has called it off")
            if not told:
                console.print(f"{node} ends what it has")
                told = True
            if time.monotonic() - began > wait_s:
                raise DeadlineExceeded(
                    f"{node} is no {role} node after {wait_s:g} s; {seen.reason or 'it goes on'}"
                )
            await asyncio.sleep(_TICK_S)


async def _look(session: aiohttp.ClientSession, node: str, router: str, key: str) -> _Seen:
    if not router:
        said = await call(session, "GET", f"{node}/health", "", draining=True)
        try:
            return msgspec.json.decode(said, type=_Seen)
        except msgspec.DecodeError as why:  # no report: it serves nothing any more, and says why
            raise RoleKept(f"{node} has not changed its role: {_message(said)}") from why
    rows = msgspec.json.decode(
        await call(session, "GET", f"{router}/admin/nodes", key), type=_Rows
    ).nodes
    found = next((row for row in rows if row.url == node), None)
    if found is None:
        raise RoleKept(f"the router does not know {node} any more")
    return found


def _message(said: bytes) -> str:
    try:
        return msgspec.json.decode(said, type=Refusal).error.message
    except msgspec.DecodeError:
        return "it answers its health check with what is no report"
