"""What a cluster still holds when nobody wants anything of it any more: blocks, leases, legs,
requests, memory.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from kvrelay.wire.outputs import Load
from tests.soak.chaos.processes import Cluster

__all__ = ["LEASE_S", "left_behind"]

LEASE_S = 5.0
"""Of the nodes' KV."""
_NOTHING = ("kvrelay_blocks_quarantined", "vllm:num_requests_running", "vllm:num_requests_waiting")
_FREE_WITHIN_S = 1.0 + 0.5  # a node tells its blocks twice a second


async def left_behind(cluster: Cluster) -> list[str]:
    """What is held a second after all nodes are up again and the leases of lost ones are over; or
    who is not up.
    """
    try:
        await cluster.whole()
    except RuntimeError as why:
        return [str(why)]
    await asyncio.sleep(max(0.0, _last_blow(cluster) + LEASE_S - time.monotonic()))
    deadline = time.monotonic() + _FREE_WITHIN_S
    while held := await _held(cluster):
        if time.monotonic() > deadline:
            return [f"{_FREE_WITHIN_S:g} s after everything had ended: {what}" for what in held]
        await asyncio.sleep(0.05)
    return []


def _last_blow(cluster: Cluster) -> float:
    assert cluster.router is not None
    every = (*cluster.nodes, cluster.router)
    return max(
        (at for node in every for span in (*node.down, *node.away) for at in span), default=0.0
    )


async def _held(cluster: Cluster) -> list[str]:
    held = []
    for node in cluster.nodes:
        told = await cluster.health(node)
        if told is None:
            held.append(f"{node.name} is not healthy")
            continue
        load = msgspec.convert(told["load"], Load)
        if load.free_blocks != load.total_blocks or told["held_blocks"]:
            held.append(
                f"{node.name} holds blocks: {load}, {told['held_blocks']} of them for others"
            )
        gauges = await cluster.metrics(node)
        held += [
            f"{node.name} has {name} {gauges[name]:g}" for name in _NOTHING if gauges.get(name, 0.0)
        ]
    assert cluster.router is not None
    told = await cluster.health(cluster.router)
    if told is None:
        return [*held, "the router is not healthy"]
    held += [
        f"the router counts {node['legs']} legs on {node['url']}"
        for node in told["nodes"]
        if node["legs"]
    ]
    if told["requests"]:
        held.append(f"the router counts {told['requests']} requests")
    return held
