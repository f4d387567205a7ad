"""Which faults come when, drawn from a seed. Pure: whoever has the processes does them (processes.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Fault", "drawn"]

KINDS = {"kill": 6, "stop": 4, "restart": 2, "kill engine": 2, "stop engine": 1}
"""How often each is drawn. kill: SIGKILL; stop: SIGSTOP, and later SIGCONT; restart: SIGTERM, which drains. Of `engine`
the process of the engine alone is struck, else the whole node."""
AT_ONCE = 0.2
"""Share of the faults that strike two nodes at once."""
SHORTEST_S, LONGEST_S = 0.2, 20.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One, `at` seconds after the first stream began. `for_s`: how long a stop lasts; `rest_s`: how long the supervisor
    waits before it starts the node again."""

    at: float
    kind: str
    nodes: tuple[int, ...]
    for_s: float = 0.0
    rest_s: float = 0.0


def drawn(seed: int, seconds: float, every_s: float, nodes: Sequence[int]) -> list[Fault]:
    """Faults at random moments within `seconds`, `every_s` apart in the mean; what lasts ends within them, too."""
    rng = random.Random(seed)
    faults = []
    at = rng.uniform(0.5, 1.5) * min(every_s, seconds / 4)
    while at < seconds:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        struck = tuple(rng.sample(list(nodes), 2 if rng.random() < AT_ONCE and len(nodes) > 1 else 1))
        for_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** rng.random() if kind.startswith("stop") else 0.0
        faults.append(Fault(at, kind, struck, min(for_s, max(SHORTEST_S, seconds - at)), rng.uniform(0.0, 1.0)))
        at += every_s * rng.uniform(0.2, 1.8)
    return faults
