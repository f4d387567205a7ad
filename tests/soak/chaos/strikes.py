"""Does what a fault says: to processes, to their network, to their logs and clocks, and by clients."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict

import msgspec

from kvrelay.wire.outputs import Load
from tests.soak.chaos.asks import LONG_ANSWER
from tests.soak.chaos.crowd import Crowd
from tests.soak.chaos.faults import CLIENTS, NETWORK, PROCESS, ROUTER, Fault
from tests.soak.chaos.processes import Cluster, Node, Struck
from tests.soak.chaos.proxies import Bad

__all__ = ["Strikes"]

# Of a node's KV, what those who fill it ask for together; how many they are at most; and how long
# it is tried.
_OVERFULL, _MOST, _FILL_S = 1.4, 200, 60.0


class Strikes:
    """All of a run."""

    def __init__(self, cluster: Cluster, crowd: Crowd) -> None:
        self._cluster, self._crowd = cluster, crowd
        self._clocks: defaultdict[str, float] = defaultdict(float)
        """By how many seconds each is off: jumps may overlap."""
        self.preemptions = 0.0

    def kinds(self) -> list[str]:
        with_shim = [*NETWORK, "clock jump"] if self._cluster.proxies is not None else []
        return [*PROCESS, *ROUTER, *with_shim, "log stall", *CLIENTS]

    async def strike(self, fault: Fault) -> None:
        """Do it, and wait until it is over: not for processes that start again."""
        if fault.kind in PROCESS or fault.kind in ROUTER:
            await self._cluster.strike(fault)
        elif fault.kind in NETWORK:
            await self._disconnect(fault)
        elif fault.kind in CLIENTS:
            missed = self._cluster.router.down_since is not None
            self._cluster.struck.append(Struck(time.monotonic(), fault, "clients", missed))
            await self._misbehave(fault)
        else:
            struck = self._cluster.struck_by(fault)
            self._cluster.note(fault, struck)
            for node in struck:
                self._disturb(node, fault.amount)
            await asyncio.sleep(fault.for_s)
            for node in struck:
                self._disturb(node, -fault.amount, over=True)

    def _disturb(self, node: Node, seconds: float, *, over: bool = False) -> None:
        if not seconds:  # a log, not a clock
            (self._cluster.logs.go_on if over else self._cluster.logs.stall)(node.log)
            return
        assert self._cluster.shim is not None
        self._clocks[node.name] += seconds
        self._cluster.shim.shift(node.name, self._clocks[node.name])

    async def _disconnect(self, fault: Fault) -> None:
        cluster, began = self._cluster, time.monotonic()
        struck = cluster.struck_by(fault)
        kind = "cut" if fault.kind.endswith("cut") else fault.kind
        if fault.kind == "peers cut":  # nodes of one role have nothing to say to each other
            others = [node for node in cluster.nodes if node.role != struck[0].role]
            struck = [struck[0], random.Random(fault.seed).choice(others)]
            cluster.note(fault, struck, missed=any(node.down_since is not None for node in struck))
            bads = [Bad(kind, struck[0].name, struck[1].name)]
        else:
            cluster.note(fault, struck)
            other = "router" if kind == "cut" else ""
            bads = [Bad(kind, node.name, other, fault.way, fault.amount) for node in struck]
        assert cluster.proxies is not None
        try:
            for bad in bads:
                cluster.proxies.tell("begin", bad)
            await asyncio.sleep(fault.for_s)
        finally:
            for bad in bads:
                cluster.proxies.tell("end", bad)
        ended = time.monotonic()
        for node in struck:
            if fault.kind != "peers cut":
                node.away.append((began, ended))

    async def _misbehave(self, fault: Fault) -> None:
        rng = random.Random(fault.seed)
        if fault.kind == "full KV":
            await self._fill(rng)
            return
        rngs = [random.Random(rng.getrandbits(32)) for _ in range(int(fault.amount))]
        kinds = ("long prompt", "long answer") if fault.kind == "crush" else ()
        leaves = fault.kind == "leavers"
        await asyncio.gather(
            *(
                self._crowd.ask_one(
                    each,
                    leave_s=each.expovariate(2.0) if leaves else math.inf,
                    slow_s=fault.for_s / 50,
                    kinds=kinds,
                )
                for each in rngs
            )
        )

    async def _fill(self, rng: random.Random) -> None:
        until, name = time.monotonic() + _FILL_S, "vllm:num_preemptions_total"
        while time.monotonic() < until:
            node = rng.choice([node for node in self._cluster.nodes if node.role == "decode"])
            told = await self._cluster.health(node)
            before = (await self._cluster.metrics(node)).get(name, 0.0)
            if told is not None:
                load = msgspec.convert(told["load"], Load)
                tokens = _OVERFULL * load.total_blocks * load.block_size
                count = min(_MOST, round(tokens / LONG_ANSWER))
                await asyncio.gather(
                    *(self._ask_node(node, rng.getrandbits(32)) for _ in range(count))
                )
                after = (await self._cluster.metrics(node)).get(name, 0.0)
                if after > before:
                    self.preemptions += after - before
                    return
            await asyncio.sleep(1.0)

    async def _ask_node(self, node: Node, seed: int) -> None:
        seen = await self._crowd.ask_one(random.Random(seed), kinds=("long answer",), node=node.url)
        if seen.end in ("broken", "refused", "error") and node.was_down(seen.began, seen.ended):
            seen.end = "left"
