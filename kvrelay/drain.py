"""`kvrelay drain`: asks a node to take nothing new, and waits until it has ended what it has.

Owns the calls and what is printed; what draining is, is node/lifecycle.py's and router/nodes/pool.py's.
Ends no process.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from kvrelay.wire.config_checks import is_base_url
from kvrelay.wire.errors import ConfigError, DeadlineExceeded, ErrorBody, KvrelayError

__all__ = ["CALL", "DrainFailed", "Refusal", "addresses", "call", "run"]

CALL = aiohttp.ClientTimeout(total=10.0, sock_connect=2.0)
_TICK_S = 0.2
_WHICH_KEY = (
    "; a router wants --admin-key (KVRELAY_ADMIN_KEY), a node --node-api-key (KVRELAY_NODE_API_KEY)"
)


class DrainFailed(KvrelayError):
    """The node or the router cannot be asked, or refused."""


class Refusal(msgspec.Struct):
    """The body of an error, of a node or the router."""

    error: ErrorBody


class _Row(msgspec.Struct):
    url: str = ""
    requests: int = 0
    legs: int = 0
    held_blocks: int = 0

    @property
    def left(self) -> str:
        requests = self.requests + self.legs
        return (
            f"{requests} requests and {self.held_blocks} held blocks"
            if requests or self.held_blocks
            else ""
        )


class _Rows(msgspec.Struct):
    nodes: list[_Row]


class _Told(msgspec.Struct):
    node_told: bool


def run(
    node: str,
    router: str,
    admin_key: str,
    node_api_key: str,
    wait_s: float,
    console: Console,
    *,
    undo: bool = False,
) -> int:
    """The command: 0 when the node is idle, or with `undo` takes requests again.

    Raises ConfigError, DrainFailed, DeadlineExceeded after `wait_s`."""
    at, keys = addresses(node, router), (admin_key, node_api_key)
    return asyncio.run(_undrain(*at, keys, console) if undo else _drain(*at, keys, wait_s, console))


def addresses(node: str, router: str) -> tuple[str, str]:
    """Both as they are put before a path; the router's may be empty. Raises ConfigError."""
    for url in filter(None, (node, router)):
        if not is_base_url(url):
            raise ConfigError(f"address {url!r} must be http:// or https://, a host and a port")
    return node.rstrip("/"), router.rstrip("/")


async def _undrain(node: str, router: str, keys: tuple[str, str], console: Console) -> int:
    async with aiohttp.ClientSession(timeout=CALL) as session:
        if router:
            await call(session, "POST", f"{router}/admin/undrain", keys[0], {"url": node})
        else:
            await call(session, "POST", f"{node}/undrain", keys[1], {})
    console.print(f"{node} takes requests again")
    return 0


async def _drain(
    node: str, router: str, keys: tuple[str, str], wait_s: float, console: Console
) -> int:
    admin_key, node_api_key = keys
    async with aiohttp.ClientSession(timeout=CALL) as session:
        by_router = False
        if router:
            said = await call(session, "POST", f"{router}/admin/drain", admin_key, {"url": node})
            # A node that is not ours does not know of it: then the router says which of its own
            # legs are left there.
            by_router = not msgspec.json.decode(said, type=_Told).node_told
        else:
            await call(session, "POST", f"{node}/drain", node_api_key, {})
        began, shown = time.monotonic(), None
        while True:
            if by_router:
                rows = msgspec.json.decode(
                    await call(session, "GET", f"{router}/admin/nodes", admin_key), type=_Rows
                )
                row = next((row for row in rows.nodes if row.url == node), _Row())
            else:
                row = msgspec.json.decode(
                    await call(session, "GET", f"{node}/health", "", draining=True), type=_Row
                )
            if not row.left:
                console.print(f"{node} is drained")
                return 0
            if row.left != shown:
                console.print(f"{node} ends {row.left}")
                shown = row.left
            if time.monotonic() - began > wait_s:
                raise DeadlineExceeded(
                    f"{node} still has {row.left} after {wait_s:g} s; it goes on draining"
                )
            await asyncio.sleep(_TICK_S)


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    key: str,
    body: Any = None,
    *,
    draining: bool = False,
) -> bytes:
    """The body of a node's or router's answer. `draining`: a 503 that is no error is one, too.
    Raises DrainFailed.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with session.request(
            method, url, json=body, headers=headers, allow_redirects=False
        ) as answer:
            said = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as why:
        raise DrainFailed(f"{url} cannot be reached: {why or type(why).__name__}") from why
    if answer.status in (200, 202):
        return said
    try:
        message = msgspec.json.decode(said, type=Refusal).error.message
    except msgspec.DecodeError as why:
        if draining and answer.status == 503:
            return said
        raise DrainFailed(f"{url} answers {answer.status}") from why
    raise DrainFailed(f"{url}: {message}{_WHICH_KEY if answer.status == 401 else ''}")
