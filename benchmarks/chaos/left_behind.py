"""What a cluster still holds when nobody wants anything of it any more: blocks, leases, legs, requests, memory."""

from __future__ import annotations

import asyncio
import time

import msgspec

from benchmarks.chaos.processes import Cluster
from wire.outputs import Load

__all__ = ["LEASE_S", "left_behind", "memory"]

LEASE_S = 5.0
"""Of the nodes' KV."""
_TEXT_BYTES, _BLOCKS = "kvrelay_router_prefix_text_bytes", "kvrelay_router_prefix_blocks"
_BLOCK_BYTES = 120  # an entry of a dict, and its key
_FREE_WITHIN_S = 1.0 + 0.5  # a node tells its blocks twice a second


async def memory(cluster: Cluster) -> int:
    """Bytes of the router's process, without what its prefix index holds: that fills up to its own limit."""
    told = await cluster.metrics()
    return cluster.router_rss() - int(told.get(_TEXT_BYTES, 0.0) + _BLOCK_BYTES * told.get(_BLOCKS, 0.0))


async def left_behind(cluster: Cluster) -> list[str]:
    """What is held a second after all nodes are up again and the leases of lost ones are over. Raises RuntimeError."""
    await cluster.whole()
    await asyncio.sleep(max(0.0, _last_blow(cluster) + LEASE_S - time.monotonic()))
    deadline = time.monotonic() + _FREE_WITHIN_S
    while held := await _held(cluster):
        if time.monotonic() > deadline:
            return [f"{_FREE_WITHIN_S:g} s after everything had ended: {what}" for what in held]
        await asyncio.sleep(0.05)
    return []


def _last_blow(cluster: Cluster) -> float:
    """When a node was struck or lost last, or was up again: its peers' leases count from there."""
    return max((moment for node in cluster.nodes for span in node.down for moment in span), default=0.0)


async def _held(cluster: Cluster) -> list[str]:
    held = []
    for node in cluster.nodes:
        told = await cluster.health(node)
        if told is None:
            held.append(f"{node.name} is not healthy")
            continue
        load = msgspec.convert(told["load"], Load)
        if load.free_blocks != load.total_blocks or told["held_blocks"]:
            held.append(f"{node.name} holds blocks: {load}, {told['held_blocks']} of them for others")
    assert cluster.router is not None
    told = await cluster.health(cluster.router)
    if told is None:
        return [*held, "the router is not healthy"]
    held += [f"the router counts {node['legs']} legs on {node['url']}" for node in told["nodes"] if node["legs"]]
    if told["requests"]:
        held.append(f"the router counts {told['requests']} requests")
    return held
