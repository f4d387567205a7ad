"""The shorter queue of two random nodes: nearly as good as the shortest of all, for any number of nodes and with old
news (Mitzenmacher 2001)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Ask, N

__all__ = ["power_of_two"]


def power_of_two(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Of two different nodes at random, the one with less depth; of equal ones the first drawn."""
    if len(nodes) == 1:
        return nodes[0]
    first = rng.randrange(len(nodes))
    second = rng.randrange(len(nodes) - 1)
    one, other = nodes[first], nodes[second + (second >= first)]
    return other if other.depth < one.depth else one
