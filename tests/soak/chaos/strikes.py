"""Does what a fault says: to processes, to their network, to their logs and clocks, and by clients."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict

from tests.soak.chaos.crowd import Crowd
from tests.soak.chaos.faults import CLIENTS, NETWORK, PROCESS, ROUTER, Fault
from tests.soak.chaos.processes import Cluster, Struck
from tests.soak.chaos.proxies import Bad
from tests.soak.chaos.rude import Rude

__all__ = ["Strikes"]


class Strikes:
    """All of a run."""

    def __init__(self, cluster: Cluster, crowd: Crowd, rude: Rude) -> None:
        self._cluster, self.crowd, self._rude = cluster, crowd, rude
        self._clocks: defaultdict[str, float] = defaultdict(float)
        """By how many seconds each is off: jumps may overlap."""

    def kinds(self) -> list[str]:
        with_shim = [*NETWORK, "clock jump"] if self._cluster.proxies is not None else []
        return [*PROCESS, *ROUTER, *with_shim, "log stall", *CLIENTS]

    async def strike(self, fault: Fault) -> None:
        """Do it, and wait until it is over: not for processes that start again."""
        if fault.kind in PROCESS or fault.kind in ROUTER:
            await self._cluster.strike(fault)
            return
        if fault.kind in NETWORK:
            await self._disconnect(fault)
            return
        struck = [] if fault.kind in CLIENTS else self._cluster.struck_by(fault)
        self._cluster.note(fault, struck)
        if fault.kind == "log stall":
            for node in struck:
                self._cluster.logs.stall(node.log)
            await asyncio.sleep(fault.for_s)
            for node in struck:
                self._cluster.logs.go_on(node.log)
        elif fault.kind == "clock jump":
            for node in struck:
                self._jump(node.name, fault.amount)
            await asyncio.sleep(fault.for_s)
            for node in struck:
                self._jump(node.name, -fault.amount)
        else:
            assert self._cluster.router is not None
            missed = self._cluster.router.down_since is not None
            self._cluster.struck.append(Struck(time.monotonic(), fault, "clients", missed))
            await self._rude.do(
                fault.kind, int(fault.amount), fault.for_s, random.Random(fault.seed)
            )
        self._cluster.over += [(time.monotonic(), fault, node) for node in struck]

    def _jump(self, name: str, seconds: float) -> None:
        assert self._cluster.shim is not None
        self._clocks[name] += seconds
        self._cluster.shim.shift(name, self._clocks[name])

    async def _disconnect(self, fault: Fault) -> None:
        cluster, began = self._cluster, time.monotonic()
        struck = cluster.struck_by(fault)
        if fault.kind == "peers cut":  # nodes of one role have nothing to say to each other
            first, others = (
                struck[0],
                [node for node in cluster.nodes if node.role != struck[0].role],
            )
            struck = [first, random.Random(fault.seed).choice(others)]
            cluster.note(fault, struck, missed=any(node.down_since is not None for node in struck))
        else:
            cluster.note(fault, struck)
        kind = _bad_kind(fault.kind)
        if fault.kind == "peers cut":
            bads = [Bad(kind, struck[0].name, struck[-1].name)]
        else:
            other = "router" if kind == "cut" else ""
            bads = [Bad(kind, node.name, other, fault.way, fault.amount) for node in struck]
        assert cluster.proxies is not None
        try:
            for bad in bads:
                cluster.proxies.begin(bad)
            await asyncio.sleep(fault.for_s)
        finally:
            for bad in bads:
                cluster.proxies.end(bad)
        ended = time.monotonic()
        for node in struck:
            if fault.kind != "peers cut":
                node.away.append((began, ended))
            cluster.over.append((ended, fault, node))


def _bad_kind(kind: str) -> str:
    return "cut" if kind.endswith("cut") else kind
