"""Which nodes a policy looks at when there are too many to look at them all. Pure.

A few at random are nearly as good as all (the power of two choices, Mitzenmacher 2001), and those that have most of the
prompt must be among them. Random ones also keep several routers, whose news is stale, from running to the same node.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import nlargest

from router.policies.policy import Ask, N

__all__ = ["ALL", "looked_at"]

ALL = 16
"""With no more nodes than these, all are looked at."""
_AT_RANDOM = 8
_HOLDERS = 4


def looked_at(ask: Ask, nodes: Sequence[N], rng: random.Random) -> Sequence[N]:
    """All nodes, or a few at random and some of those that have most of the prompt, each once."""
    if len(nodes) <= ALL:
        return nodes
    few = rng.sample(range(len(nodes)), _AT_RANDOM)
    if ask.cached:
        few = [*dict.fromkeys([*_holders(ask, nodes, rng), *few])]
    return [nodes[at] for at in few]


def _holders(ask: Ask, nodes: Sequence[N], rng: random.Random) -> list[int]:
    tokens = [ask.cached.get(node.url, 0) for node in nodes]
    least = max(1, min(nlargest(_HOLDERS, tokens)))
    holders = [at for at, each in enumerate(tokens) if each >= least]
    if len(holders) <= _HOLDERS:
        return holders
    # Many may have the same: a system prompt is everywhere. Then any of them will do.
    more = [at for at in holders if tokens[at] > least]
    return more + rng.sample([at for at in holders if tokens[at] == least], _HOLDERS - len(more))
