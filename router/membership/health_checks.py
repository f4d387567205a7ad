"""The health loop: asks every node for its health, each on its own beat, and tells the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from kvrelay.router.background import cancel_and_wait
from kvrelay.router.nodes.node import HealthReport, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.prefix.kv_events import KvEvents
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.wire.errors import EngineDead

__all__ = ["check_nodes"]

_log = logging.getLogger("kvrelay.router")


@asynccontextmanager
async def check_nodes(
    pool: Pool, client: NodeClient, events: KvEvents | None, interval_s: float
) -> AsyncIterator[None]:
    """Check all nodes for the length of the block, and follow their KV events, if wanted."""
    watches: dict[Node, asyncio.Task[None]] = {}

    async def watch(node: Node) -> None:
        while True:
            await _check(node, pool, client, events)
            await asyncio.sleep(interval_s)

    def joined(node: Node) -> None:
        watches[node] = asyncio.create_task(watch(node))

    def left(node: Node) -> None:
        watches.pop(node).cancel()
        client.forget(node)
        if events is not None:
            events.leave(node.url)

    pool.joined, pool.left = joined, left
    for node in (*pool.nodes, *pool.leaving):
        joined(node)
    try:
        yield
    finally:
        pool.joined = pool.left = lambda _node: None
        await cancel_and_wait(watches.values())


async def _check(node: Node, pool: Pool, client: NodeClient, events: KvEvents | None) -> None:
    started = time.monotonic()
    try:
        report = await client.health(node)
        if not isinstance(report, HealthReport):
            pool.note_unready(node, report, time.monotonic())
            return
        pool.note_report(node, report, started, time.monotonic())
        if events is not None:
            events.note_report(node.url, node.generation, report.kv_events)
    except EngineDead as why:
        pool.note_unready(node, why.message, time.monotonic(), died=True, cut=True)
    except TimeoutError:
        said = "it did not answer its health check in time"
        pool.note_unready(node, said, time.monotonic(), missed=True)
    except (aiohttp.ClientError, OSError) as why:
        cause = why.os_error if isinstance(why, aiohttp.ClientConnectorError) else why
        refused = isinstance(cause, ConnectionRefusedError)
        said = "it refuses connections" if refused else f"its health check failed: {why}"
        pool.note_unready(node, said, time.monotonic(), missed=not refused, died=refused)
    except Exception as why:  # noqa: BLE001 - a mistake of ours must not end the watch
        _log.exception("the health check of %s node %s failed", node.role, node.url)
        said = f"its health check failed: {why!r}"
        pool.note_unready(node, said, time.monotonic(), missed=True)
