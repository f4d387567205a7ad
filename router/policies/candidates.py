"""Which nodes a policy looks at when there are too many to look at them all. Pure.

A few at random are nearly as good as all (the power of two choices, Mitzenmacher 2001), and those that have most of the
prompt must be among them. Random ones also keep several routers, whose news is stale, from running to the same node.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Ask, N

__all__ = ["ALL", "looked_at"]

ALL = 32
"""With no more nodes than these, all are looked at."""
_AT_RANDOM = 12
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
    cached = ask.cached
    having = [(cached[node.url], at) for at, node in enumerate(nodes) if node.url in cached]
    if len(having) <= _HOLDERS:
        return [at for _, at in having]
    # Many may have the same: a system prompt is everywhere. Then any of them will do.
    least = sorted((tokens for tokens, _ in having), reverse=True)[_HOLDERS - 1]
    more = [at for tokens, at in having if tokens > least]
    return more + rng.sample([at for tokens, at in having if tokens == least], _HOLDERS - len(more))
