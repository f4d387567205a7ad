"""The health loop: asks every node for its health, each on its own beat, and tells the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from kvrelay.router.background import cancel_and_wait
from kvrelay.router.nodes.node import HealthReport, Node, NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.prefix.kv_events import KvEvents
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.wire.errors import EngineDead

__all__ = ["watching"]

_log = logging.getLogger("kvrelay.router")


@asynccontextmanager
async def watching(
    pool: Pool, legs: NodeClient, events: KvEvents | None, interval_s: float
) -> AsyncIterator[None]:
    """Check all nodes for the length of the block, from when they join until they are gone, and
    follow their KV events.

    A slow one does not delay the others. `events`: None if nobody wants to know what nodes have in
    their caches.
    """
    watches: dict[Node, asyncio.Task[None]] = {}

    def joined(node: Node) -> None:
        watches[node] = asyncio.create_task(_watch(node, pool, legs, events, interval_s))

    def left(node: Node) -> None:
        watches.pop(node).cancel()
        legs.forget(node)
        if events is not None:
            events.leave(node.url)

    unfollow = pool.follow(joined, left)
    try:
        yield
    finally:
        unfollow()
        await cancel_and_wait(watches.values())


async def _watch(
    node: Node, pool: Pool, legs: NodeClient, events: KvEvents | None, interval_s: float
) -> None:
    """Check a node again and again. One that is down is asked each interval, whether or not it has
    answered the last time: what was sent into a cut network comes late or never when it is whole
    again, a new question at once.
    """
    checks: set[asyncio.Task[None]] = set()
    try:
        while True:
            began = time.monotonic()
            checks.add(asyncio.create_task(_check(node, pool, legs, events)))
            _, checks = await asyncio.wait(
                checks, timeout=None if node.up else interval_s, return_when=asyncio.FIRST_COMPLETED
            )
            if node.up:  # what older checks did not hear is not true any more
                _cancel(checks)
                began = time.monotonic()
            await asyncio.sleep(began + interval_s - time.monotonic())
    finally:
        _cancel(checks)


def _cancel(checks: set[asyncio.Task[None]]) -> None:
    for check in checks:
        check.cancel()
    checks.clear()


async def _check(node: Node, pool: Pool, legs: NodeClient, events: KvEvents | None) -> None:
    started = time.monotonic()
    try:
        report = await legs.health(node)
        if not isinstance(report, HealthReport):
            pool.note_unready(node, report, time.monotonic())
            return
        pool.note_report(node, report, started, time.monotonic())
        if events is None:
            pass
        elif report.kind is NodeKind.KVRELAY:
            events.heard(node.url, node.generation, report.kv_events)
        else:
            events.heard_vllm(node.url, node.generation, report.engines, report.aliases)
    except EngineDead as why:
        pool.note_dead(node, why.message, time.monotonic())
    except TimeoutError:
        pool.note_miss(
            node, "it did not answer its health check in time", started, time.monotonic()
        )
    except (aiohttp.ClientError, OSError) as why:
        if isinstance(why, aiohttp.ClientConnectorError) and isinstance(
            why.os_error, ConnectionRefusedError
        ):
            pool.note_refused(node, time.monotonic())  # the machine is there
        else:
            pool.note_miss(node, f"its health check failed: {why}", started, time.monotonic())
    except Exception as why:  # noqa: BLE001 - a mistake of ours must not end the watch
        _log.exception("the health check of %s node %s failed", node.role, node.url)
        pool.note_miss(node, f"its health check failed: {why!r}", started, time.monotonic())
