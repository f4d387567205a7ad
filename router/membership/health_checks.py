"""The health loop: asks every node for its health, each on its own beat, and tells the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

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
    checker = _Checker(pool, client, events, interval_s)
    watches: dict[Node, asyncio.Task[None]] = {}

    def joined(node: Node) -> None:
        watches[node] = asyncio.create_task(checker.watch(node))

    def left(node: Node) -> None:
        watches.pop(node).cancel()
        client.forget(node)
        if events is not None:
            events.leave(node.url)

    unfollow = pool.follow(joined, left)
    try:
        yield
    finally:
        unfollow()
        await cancel_and_wait(watches.values())


@dataclass(frozen=True, slots=True)
class _Checker:
    pool: Pool
    client: NodeClient
    events: KvEvents | None
    interval_s: float

    async def watch(self, node: Node) -> None:
        # A node that is down is asked each interval, whether or not it has answered the last time:
        # what was sent into a cut network comes late or never when it is whole again, a new
        # question at once.
        checks: set[asyncio.Task[None]] = set()
        try:
            while True:
                began = time.monotonic()
                checks.add(asyncio.create_task(self._check(node)))
                _, checks = await asyncio.wait(
                    checks,
                    timeout=None if node.up else self.interval_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if node.up:  # what older checks did not hear is not true any more
                    _cancel(checks)
                    began = time.monotonic()
                await asyncio.sleep(began + self.interval_s - time.monotonic())
        finally:
            _cancel(checks)

    async def _check(self, node: Node) -> None:
        pool, started = self.pool, time.monotonic()
        try:
            report = await self.client.health(node)
            if not isinstance(report, HealthReport):
                pool.note_unready(node, report, time.monotonic())
                return
            pool.note_report(node, report, started, time.monotonic())
            if self.events is not None:
                self.events.note_report(node.url, node.generation, report.kv_events)
        except EngineDead as why:
            pool.note_dead(node, why.message, time.monotonic())
        except TimeoutError:
            late = "it did not answer its health check in time"
            pool.note_miss(node, late, started, time.monotonic())
        except (aiohttp.ClientError, OSError) as why:
            if isinstance(why, aiohttp.ClientConnectorError) and isinstance(
                why.os_error, ConnectionRefusedError
            ):
                pool.note_refused(node, time.monotonic())  # the machine is there
            else:
                failed = f"its health check failed: {why}"
                pool.note_miss(node, failed, started, time.monotonic())
        except Exception as why:  # noqa: BLE001 - a mistake of ours must not end the watch
            _log.exception("the health check of %s node %s failed", node.role, node.url)
            failed = f"its health check failed: {why!r}"
            pool.note_miss(node, failed, started, time.monotonic())


def _cancel(checks: set[asyncio.Task[None]]) -> None:
    for check in checks:
        check.cancel()
    checks.clear()
