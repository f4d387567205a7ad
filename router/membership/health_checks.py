"""The health loop: asks each node for its health on a beat of its own, and follows its KV events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import aiohttp

from kvrelay.router.background import cancel_and_wait, running_task
from kvrelay.router.nodes.node import HealthReport, Lease, Node, NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.wire.errors import EngineDead, KvrelayError, without_frames
from kvrelay.wire.frames import Frame
from kvrelay.wire.kv_events import KV_EVENTS_PATH, keys_of, read_changes

__all__ = ["check_nodes"]

_log = logging.getLogger("kvrelay.router")


@asynccontextmanager
async def check_nodes(
    pool: Pool, client: NodeClient, interval_s: float, *, follow: bool
) -> AsyncIterator[None]:
    """Check all nodes for the length of the block, and `follow` their KV events."""
    watches: dict[Node, asyncio.Task[None]] = {}

    async def watch(node: Node) -> None:
        async with (
            running_task(_follow(node, pool, client, interval_s)) if follow else nullcontext()
        ):
            while True:
                await _check(node, pool, client)
                await asyncio.sleep(interval_s)

    def joined(node: Node) -> None:
        watches[node] = asyncio.create_task(watch(node))

    def left(node: Node) -> None:
        watches.pop(node).cancel()
        client.forget(node)

    pool.joined, pool.left = joined, left
    for node in (*pool.nodes, *pool.leaving):
        joined(node)
    try:
        yield
    finally:
        pool.joined = pool.left = lambda _node: None
        await cancel_and_wait(watches.values())


async def _follow(node: Node, pool: Pool, client: NodeClient, interval_s: float) -> None:
    index, url = pool.prefixes, node.url

    def take(frame: Frame) -> None:
        news = read_changes(frame.payload)
        keys = keys_of(news.stored), keys_of(news.removed)
        index.changed(url, *keys, time.monotonic(), cleared=news.cleared, medium=news.medium)

    while True:
        try:
            if node.kind is NodeKind.KVRELAY:
                await client.run(Lease(node), KV_EVENTS_PATH, b"", {}, take)
        except KvrelayError as why:  # there is no stream, or the node tells nothing
            without_frames(why)  # the request keeps it, and it would keep the request
        except Exception:  # noqa: BLE001 - a mistake of ours must not end the task
            _log.exception("KV events of %s node %s are malformed", node.role, url)
        finally:
            index.lost(url)
        await asyncio.sleep(interval_s)


async def _check(node: Node, pool: Pool, client: NodeClient) -> None:
    started = time.monotonic()
    try:
        report = await client.health(node)
        if not isinstance(report, HealthReport):
            pool.note_unready(node, report, time.monotonic())
            return
        pool.note_report(node, report, started, time.monotonic())
    except EngineDead as why:
        pool.note_unready(node, why.message, time.monotonic(), died=True, cut=True)
    except Exception as why:  # noqa: BLE001 - a mistake of ours must not end the watch
        if not isinstance(why, aiohttp.ClientError | OSError):
            _log.exception("the health check of %s node %s failed", node.role, node.url)
        refused = isinstance(getattr(why, "os_error", why), ConnectionRefusedError)
        failed = f"its health check failed: {type(why).__name__} {why}".strip()  # no repr: the key
        said = "it refuses connections" if refused else failed
        pool.note_unready(node, said, time.monotonic(), missed=not refused, died=refused)
