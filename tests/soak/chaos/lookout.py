"""Looks at the cluster while it is struck: when the router takes a node again."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass

from tests.soak.chaos.processes import Cluster

__all__ = ["LATEST_S", "Lookout", "Recovery", "recoveries"]

LATEST_S = 15.0
"""A node that is not taken again so long after its fault's end is lost; the aim is 1 s."""
_LOOK_S = 0.1
_ROUTER_S = 1.0
"""After which a router that was started again knows its nodes."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A node's time from the end of a fault until the router had it up again.

    None: not seen in `watched_s`, which ended with the next fault.
    """

    kind: str
    node: str
    ended: float
    up_s: float | None
    watched_s: float

    @property
    def late(self) -> bool:
        return (self.watched_s if self.up_s is None else self.up_s) > LATEST_S


class Lookout:
    """`run` until it is cancelled."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.looks: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        """By the node's name: monotonic seconds, and whether the router had it up."""

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await self._look()
            await asyncio.sleep(max(0.0, began + _LOOK_S - time.monotonic()))

    async def _look(self) -> None:
        if self._cluster.router.down_since is not None:
            return
        told = await self._cluster.health(self._cluster.router, any_status=True)
        if told is not None:
            up, now = {node["url"] for node in told["nodes"] if node["up"]}, time.monotonic()
            for node in self._cluster.nodes:
                self.looks[node.name].append((now, node.url in up))


def recoveries(
    cluster: Cluster, looks: dict[str, list[tuple[float, bool]]], until: float
) -> list[Recovery]:
    """Of all faults of nodes that ended while nothing else was wrong there, until the next blow."""
    blows = [(each.at, each.node) for each in cluster.struck if not each.missed]
    began = {(id(each.fault), each.node): each.at for each in cluster.struck}
    router = [*cluster.router.away, *((a, b + _ROUTER_S) for a, b in cluster.router.down)]
    found = []
    for ended, fault, node in cluster.over:
        if node is cluster.router:
            continue
        next_blow = min(
            (at for at, name in blows if at > ended and name in (node.name, "router")),
            default=until,
        )
        own = began.get((id(fault), node.name))
        wrong = any(a < ended < b and a != own for a, b in (*node.down, *node.away, *router))
        if wrong or next_blow - ended < _LOOK_S:
            continue
        seen = [(at, up) for at, up in looks.get(node.name, ()) if ended <= at < next_blow]
        down = max((at for at, up in seen if not up and at <= ended + LATEST_S), default=ended)
        up_s = next((at - ended for at, up in seen if up and at >= down), None)
        found.append(Recovery(fault.kind, node.name, ended, up_s, next_blow - ended))
    return found
