"""The node that has most of the prompt, unless its queue is too deep."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.bound import most_depth
from router.policies.least_queue import least_queue
from router.policies.policy import Ask, N

__all__ = ["prefix"]


def prefix(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Choose the shortest queue of those with the longest cached prefix whose queue is within the bound."""
    if not ask.cached:
        return least_queue(ask, nodes, rng)
    most = most_depth(nodes)
    within = [node for node in nodes if node.depth <= most]
    cached = [ask.cached.get(node.url, 0) for node in within]
    longest = max(cached)
    return least_queue(ask, [node for node, tokens in zip(within, cached, strict=True) if tokens == longest], rng)
