"""Which faults come when, drawn from a seed. Pure: strikes.py does them."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence

import msgspec

__all__ = [
    "CLIENTS",
    "KINDS",
    "MACHINE",
    "NETWORK",
    "PROCESS",
    "ROUTER",
    "Fault",
    "endless",
    "once",
]

PROCESS = {"kill": 6, "stop": 4, "restart": 2, "kill engine": 2, "stop engine": 1}
"""How often each is drawn. kill: SIGKILL; stop: SIGSTOP, and later SIGCONT; restart: SIGTERM, which
drains. Of `engine` the process of the engine alone is struck, else the whole node.
"""
ROUTER = {"kill router": 1, "restart router": 1, "stop router": 1}
NETWORK = {"cut": 2, "one-way cut": 2, "peers cut": 2, "resets": 2, "loss": 2, "delay": 2}
"""cut: nothing passes between the router and a node; one-way cut: nothing in one direction; peers
cut: nothing between a node and one of the other role; resets: every connection of a node is reset;
loss: packets of a node are lost; delay: they come late.
"""
MACHINE = {"log stall": 2, "clock jump": 2}
"""log stall: nobody takes what a process logs; clock jump: the wall clock of a process is another
one for a while.
"""
CLIENTS = {"leavers": 2, "slow readers": 2, "crush": 2, "full KV": 2}
"""leavers: clients go away in the middle; slow readers: they read a little at a time; crush: long
prompts, more than the nodes have KV for; full KV: long answers, all from one decode node, past the
router, which would let in only as many as it has room for: requests are preempted.
"""
KINDS = PROCESS | ROUTER | NETWORK | MACHINE | CLIENTS
AT_ONCE = 0.2
"""Share of the faults that strike two nodes at once."""
SHORTEST_S, LONGEST_S = 0.2, 20.0
SHORT = {
    "resets": 2.0,
    "stop router": 5.0,
    "loss": 8.0,
    "delay": 8.0,
    "clock jump": 10.0,
    "log stall": 10.0,
}
"""Kinds that last at most so many seconds."""
_LASTING = ("stop", "stop engine", "slow readers", *NETWORK, *SHORT)
_CLOCKS_S = (-3600.0, -90.0, -5.0, 5.0, 90.0, 3600.0)


class Fault(msgspec.Struct, frozen=True):
    """One, `at` seconds after the first stream began. `for_s`: how long it lasts."""

    at: float
    kind: str
    nodes: tuple[int, ...]
    """Their numbers; -1 is the router. Of what strikes the router alone, or is done by clients:
    none.
    """
    for_s: float = 0.0
    amount: float = 0.0
    """Share of packets that are lost, seconds of a delay, seconds that a clock jumps, or how many
    clients.
    """
    way: str = "both"
    """Of a one-way cut, seen from the node: in or out."""
    seed: int = 0
    """Of what else is drawn when it happens."""


def endless(
    seed: int, every_s: float, nodes: Sequence[int], kinds: Collection[str]
) -> Iterator[Fault]:
    rng = random.Random(seed)
    weights = {kind: weight for kind, weight in KINDS.items() if kind in kinds}
    at = rng.uniform(0.5, 1.5) * every_s
    while True:
        (kind,) = rng.choices(list(weights), list(weights.values()))
        yield _fault(rng, at, kind, nodes)
        at += every_s * rng.uniform(0.2, 1.8)


def once(seed: int, nodes: Sequence[int], kinds: Collection[str], longest_s: float) -> list[Fault]:
    """Draw each kind once, in a random order, none longer than `longest_s`."""
    rng = random.Random(seed)
    order = [kind for kind in KINDS if kind in kinds]
    rng.shuffle(order)
    faults = [_fault(rng, 0.0, kind, nodes) for kind in order]
    return [msgspec.structs.replace(fault, for_s=min(fault.for_s, longest_s)) for fault in faults]


def _fault(rng: random.Random, at: float, kind: str, nodes: Sequence[int]) -> Fault:
    several = rng.random() < AT_ONCE and len(nodes) > 1 and kind != "peers cut"
    struck = tuple(rng.sample(list(nodes), 2 if several else 1))
    if kind in ROUTER or kind in CLIENTS:
        struck = ()
    elif kind in MACHINE and rng.random() < 1 / (len(nodes) + 1):
        struck = (-1,)
    longest_s = SHORT.get(kind, LONGEST_S)
    lasts = kind in _LASTING
    for_s = SHORTEST_S * math.pow(longest_s / SHORTEST_S, rng.random()) if lasts else 0.0
    amounts = {
        "loss": round(rng.uniform(0.02, 0.3), 3),
        "delay": round(rng.uniform(0.01, 0.3), 3),
        "clock jump": rng.choice(_CLOCKS_S),
        **{kind: float(rng.randint(5, 25)) for kind in CLIENTS},
    }
    way = rng.choice(["in", "out"]) if kind == "one-way cut" else "both"
    return Fault(at, kind, struck, for_s, amounts.get(kind, 0.0), way, rng.randrange(1 << 30))
