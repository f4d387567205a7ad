"""The node that has most of the prompt, unless its queue is too deep."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.bound import most_depth
from router.policies.candidates import looked_at
from router.policies.least_queue import least_queue
from router.policies.policy import Ask, N

__all__ = ["prefix"]


def prefix(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Of the nodes with the longest cached prefix whose queue is within the bound, the one with the shortest queue;
    with nothing cached there, the shortest queue of all."""
    few = looked_at(ask, nodes, rng)
    if not ask.cached:
        return least_queue(ask, few, rng)
    most = most_depth(few)
    within = [node for node in few if node.depth <= most]
    cached = [ask.cached.get(node.url, 0) for node in within]
    longest = max(cached)
    return least_queue(ask, [node for node, tokens in zip(within, cached, strict=True) if tokens == longest], rng)
