"""What a cluster still holds when nobody wants anything of it any more: blocks, leases, legs,
requests; and what its processes have grown to.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.local_cluster import family
from kvrelay.wire.outputs import Load
from tests.soak.chaos.processes import Cluster

__all__ = ["LEASE_S", "Size", "grown", "left_behind", "size_of", "sizes_apart"]

LEASE_S = 5.0
"""Of the nodes' KV."""
_NOTHING = ("kvrelay_blocks_quarantined", "vllm:num_requests_running", "vllm:num_requests_waiting")
_FREE_WITHIN_S = 1.0 + 0.5  # a node tells its blocks twice a second
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TEXTS, _BLOCKS = "kvrelay_router_prefix_texts", "kvrelay_router_prefix_blocks"
_TEXT_BYTES, _BLOCK_BYTES = 200, 120  # entries, and their keys


@dataclass(frozen=True, slots=True)
class Size:
    """Of one process."""

    pid: int
    memory: int
    files: int
    sockets: int
    threads: int


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
    return max(
        (at for node in cluster.every for span in (*node.down, *node.away) for at in span),
        default=0.0,
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


async def sizes_apart(cluster: Cluster) -> dict[str, Size]:
    """Sizes by process; the router's without its prefix index, which fills up to its own limit."""
    told = await cluster.metrics(cluster.router)
    index = int(_TEXT_BYTES * told.get(_TEXTS, 0.0) + _BLOCK_BYTES * told.get(_BLOCKS, 0.0))
    found = {
        name: await asyncio.to_thread(size_of, pid)
        for node in cluster.every
        for name, pid in zip(
            (node.name, f"{node.name} engine"), family(node.process.pid), strict=False
        )
    }
    if "router" in found:
        found["router"] = replace(found["router"], memory=found["router"].memory - index)
    return found


def size_of(*pids: int) -> Size:
    """Of processes together; those that are not there any more have nothing."""
    memory = files = sockets = threads = 0
    for pid in pids:
        proc = Path(f"/proc/{pid}")
        with suppress(OSError, IndexError, ValueError):
            memory += int((proc / "statm").read_text().split()[1]) * _PAGE
            threads += len(list((proc / "task").iterdir()))
            for link in (proc / "fd").iterdir():
                with suppress(OSError):
                    files += 1
                    sockets += os.readlink(link).startswith("socket:")
    return Size(pids[0], memory, files, sockets, threads)


def grown(before: dict[str, Size], after: dict[str, Size], more: Size) -> list[str]:
    """What has grown by more than `more` allows, by process; memory only of a process that is still
    the same.
    """
    told = []
    for name, now in after.items():
        then = before.get(name)
        if then is None:
            continue
        for what in ("memory", "files", "sockets", "threads"):
            was, is_, allowed = getattr(then, what), getattr(now, what), getattr(more, what)
            if is_ - was > allowed and (what != "memory" or then.pid == now.pid):
                told.append(
                    f"{name} has grown from {was:,} to {is_:,} {what}; {allowed:,} more are allowed"
                )
    return told
