"""Looks at the cluster while it is struck: when the router takes a node again, and what each
process has grown to.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.local_cluster import family
from tests.soak.chaos.processes import Cluster

__all__ = [
    "LATEST_S",
    "Lookout",
    "Recovery",
    "Size",
    "grown",
    "recoveries",
    "size_of",
    "sizes_apart",
]

LATEST_S = 15.0
"""A node that is not taken again so long after its fault's end is lost; the aim is 1 s."""
_LOOK_S = 0.1
_ROUTER_S = 1.0
"""After which a router that was started again knows its nodes."""
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


@dataclass(frozen=True, slots=True)
class Look:
    """What the router said of a node at a monotonic second; `legs`: it had some there."""

    at: float
    up: bool
    legs: bool


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the end of a fault until the router had its node up again, and a leg on it; None: not
    seen in `watched_s`, which ended with the next fault, or because nobody asked.
    """

    kind: str
    node: str
    ended: float
    up_s: float | None
    leg_s: float | None
    watched_s: float

    @property
    def late(self) -> bool:
        return (self.watched_s if self.up_s is None else self.up_s) > LATEST_S


class Lookout:
    """`run` until it is cancelled."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.looks: dict[str, list[Look]] = defaultdict(list)
        """All of them, by the node's name."""

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await self._look()
            await asyncio.sleep(max(0.0, began + _LOOK_S - time.monotonic()))

    async def _look(self) -> None:
        assert self._cluster.router is not None
        if self._cluster.router.down_since is not None:
            return
        told = await self._cluster.health(self._cluster.router, any_status=True)
        if told is None:
            return
        now, by_url = time.monotonic(), {node["url"]: node for node in told["nodes"]}
        for node in self._cluster.nodes:
            said = by_url.get(node.url, {"up": False, "legs": 0})
            self.looks[node.name].append(Look(now, bool(said["up"]), bool(said["legs"])))


def recoveries(cluster: Cluster, looks: dict[str, list[Look]], until: float) -> list[Recovery]:
    """Of all faults of nodes that ended while nothing else was wrong there, until the next blow."""
    assert cluster.router is not None
    blows = [(each.at, each.node) for each in cluster.struck if not each.missed]
    began = {(id(each.fault), each.node): each.at for each in cluster.struck}
    found = []
    for ended, fault, node in cluster.over:
        if node is cluster.router:
            continue
        next_blow = min(
            (at for at, name in blows if at > ended and name in (node.name, "router")),
            default=until,
        )
        own = began.get((id(fault), node.name))
        wrong = [
            *node.down,
            *node.away,
            *cluster.router.away,
            *((a, b + _ROUTER_S) for a, b in cluster.router.down),
        ]
        if any(a < ended < b and a != own for a, b in wrong) or next_blow - ended < _LOOK_S:
            continue
        seen = [look for look in looks.get(node.name, ()) if ended <= look.at < next_blow]
        down = max(
            (look.at for look in seen if not look.up and look.at <= ended + LATEST_S), default=ended
        )
        up = next((look.at - ended for look in seen if look.up and look.at >= down), None)
        leg = next(
            (look.at - ended for look in seen if look.up and look.legs and look.at >= down), None
        )
        found.append(Recovery(fault.kind, node.name, ended, up, leg, next_blow - ended))
    return found


def sizes(cluster: Cluster) -> dict[str, Size]:
    assert cluster.router is not None
    found = {}
    for node in (*cluster.nodes, cluster.router):
        for name, pid in zip(
            (node.name, f"{node.name} engine"), family(node.process.pid), strict=False
        ):
            found[name] = size_of(pid)
    return found


async def sizes_apart(cluster: Cluster) -> tuple[dict[str, Size], int]:
    """The same, without the router's prefix index, which fills up to a limit of its own; and the
    index, about.
    """
    assert cluster.router is not None
    found, told = await asyncio.to_thread(sizes, cluster), await cluster.metrics(cluster.router)
    index = int(_TEXT_BYTES * told.get(_TEXTS, 0.0) + _BLOCK_BYTES * told.get(_BLOCKS, 0.0))
    if "router" in found:
        found["router"] = replace(found["router"], memory=found["router"].memory - index)
    return found, index


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
