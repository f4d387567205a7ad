"""`kvrelay drain` and `kvrelay role`: ask a node to drain or to change its role, and wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import typer

from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, DeadlineExceeded, KvrelayError
from kvrelay.wire.frames import MALFORMED

__all__ = ["change_role", "drain"]

_TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=2.0)
_TICK_S = 0.2
_HINTS = {
    401: "; give it with --node-api-key (KVRELAY_NODE_API_KEY)",
    404: "; give the address of a node, not of a router",
}


class _Report(msgspec.Struct):
    role: Role | None = None
    flips_to: Role | None = None
    requests: int = 0
    held_blocks: int = 0


def drain(node: str, key: str, wait_s: float, *, undo: bool = False) -> int:
    """Drain a node and return 0 when it is idle, or with `undo` have it take requests again.

    Raises KvrelayError, and DeadlineExceeded after `wait_s`.
    """
    if undo:
        asyncio.run(_changed(node, key, "undrain", {}, wait_s, lambda _: True))
        typer.echo(f"{node} takes requests again")
    else:
        asyncio.run(
            _changed(node, key, "drain", {}, wait_s, lambda it: not (it.requests or it.held_blocks))
        )
        typer.echo(f"{node} is drained")
    return 0


def change_role(node: str, key: str, role: str, wait_s: float) -> int:
    """Change a node's role and return 0 when it has it.

    Raises ConfigError, KvrelayError, and DeadlineExceeded after `wait_s`.
    """
    if role not in (Role.PREFILL, Role.DECODE):
        raise ConfigError(f"role must be prefill or decode, got {role!r}")
    has = asyncio.run(
        _changed(node, key, "admin/role", {"role": role}, wait_s, lambda it: it.flips_to is None)
    ).role
    if has != role:
        raise KvrelayError(f"{node} is a {has} node still: somebody has called it off")
    typer.echo(f"{node} is a {role} node")
    return 0


async def _changed(
    node: str, key: str, path: str, body: Any, wait_s: float, ended: Callable[[_Report], bool]
) -> _Report:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    until, shown = time.monotonic() + wait_s, ""
    async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers) as http:
        await _call(http, "POST", f"{node}/{path}", body)
        while True:
            said = await _call(http, "GET", f"{node}/health")
            try:
                report = msgspec.json.decode(said, type=_Report)
            except MALFORMED as why:
                raise KvrelayError(
                    f"{node} answers its health check with what is no report"
                ) from why
            if ended(report):
                return report
            left = f"{report.requests} requests and {report.held_blocks} held blocks"
            if time.monotonic() > until:
                raise DeadlineExceeded(f"{node} still has {left} after {wait_s:g} s; it goes on")
            if left != shown:
                typer.echo(f"{node} still has {left}")
                shown = left
            await asyncio.sleep(_TICK_S)


async def _call(http: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> bytes:
    try:
        async with http.request(method, url, json=body, allow_redirects=False) as answer:
            said = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as why:
        raise KvrelayError(f"{url} cannot be reached: {str(why) or repr(why)}") from why
    if answer.status in (200, 202):
        return said
    try:
        message = msgspec.json.decode(said)["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError) as why:
        if answer.status == 503 and body is None:  # a report while it drains
            return said
        raise KvrelayError(f"{url} answers {answer.status}") from why
    hint = _HINTS.get(answer.status, "")
    if "admin key" in message:  # nodes have none
        message, hint = "this is a router, and roles are of nodes", _HINTS[404]
    raise KvrelayError(f"{url}: {message}{hint}")
