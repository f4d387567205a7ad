"""Any node, all equally likely: what others are measured against."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Ask, N

__all__ = ["random_node"]


def random_node(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Any of them."""
    return nodes[rng.randrange(len(nodes))]
