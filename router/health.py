"""The health loop: asks every node for its health, each on its own beat, and tells the pool."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from router.legs import Legs
from router.pool import HealthReport, Node, Pool

__all__ = ["watch_nodes"]


async def watch_nodes(pool: Pool, legs: Legs, interval_s: float) -> None:
    """Check all nodes until cancelled; a slow one does not delay the others."""
    async with asyncio.TaskGroup() as group:
        for node in pool.nodes:
            group.create_task(_watch(node, pool, legs, interval_s))


async def _watch(node: Node, pool: Pool, legs: Legs, interval_s: float) -> None:
    while True:
        await _check(node, pool, legs)
        await asyncio.sleep(interval_s)


async def _check(node: Node, pool: Pool, legs: Legs) -> None:
    started = time.monotonic()
    try:
        report = await legs.health(node)
    except TimeoutError:
        pool.miss(node, "it did not answer its health check in time", time.monotonic())
    except aiohttp.ClientConnectorError as why:
        if isinstance(why.os_error, ConnectionRefusedError):
            # The machine is there, nobody listens: a draining node goes on with its legs, a dead one has lost them.
            pool.unready(node, "it refuses connections", time.monotonic())
        else:
            pool.miss(node, f"its health check failed: {why}", time.monotonic())
    except (aiohttp.ClientError, OSError) as why:
        pool.miss(node, f"its health check failed: {why}", time.monotonic())
    else:
        if isinstance(report, HealthReport):
            pool.report(node, report, started, time.monotonic())
        else:
            pool.unready(node, report, time.monotonic())
