"""The node with the shortest queue."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Ask, N

__all__ = ["least_queue"]


def least_queue(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """The node with the least depth, ties broken by `rng`."""
    depths = [node.depth for node in nodes]
    least = min(depths)
    return nodes[rng.choice([at for at, depth in enumerate(depths) if depth == least])]
