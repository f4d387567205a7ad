"""The node with the shortest queue."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Ask, NodeView

__all__ = ["least_queue"]


def least_queue(ask: Ask, nodes: Sequence[NodeView], rng: random.Random) -> NodeView:
    """The node with the least depth, ties broken by `rng`."""
    least = min(node.depth for node in nodes)
    return rng.choice([node for node in nodes if node.depth == least])
