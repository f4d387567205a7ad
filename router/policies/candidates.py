"""Which nodes a policy looks at when there are too many to look at them all. Pure.

The shortest queues of some at random are nearly as good as those of all (the power of two choices, Mitzenmacher 2001),
and those that have most of the prompt must be among them. That they are random also keeps several routers, whose news
is stale, from running to the same node.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import nlargest, nsmallest
from operator import attrgetter

from router.policies.policy import Ask, N

__all__ = ["ALL", "looked_at"]

ALL = 16
"""With no more nodes than these, all are looked at."""
_DRAWN = 32
_SHORTEST = 6
_AT_RANDOM = 2
_HOLDERS = 4

_depth = attrgetter("depth")


def looked_at(ask: Ask, nodes: Sequence[N], rng: random.Random) -> Sequence[N]:
    """All nodes, or a few: the shortest queues of some, a few of any depth, and some that have most of the prompt."""
    if len(nodes) <= ALL:
        return nodes
    # A piece of the ring of all, which takes a tenth of the time of as many single ones.
    first = rng.randrange(len(nodes))
    drawn = [*nodes[first : first + _DRAWN], *nodes[: max(0, min(first, first + _DRAWN - len(nodes)))]]
    few = [*drawn[:_AT_RANDOM], *nsmallest(_SHORTEST, drawn[_AT_RANDOM:], key=_depth)]
    if ask.cached:
        few = [*dict.fromkeys([*(nodes[at] for at in _holders(ask, nodes, rng)), *few])]
    return few


def _holders(ask: Ask, nodes: Sequence[N], rng: random.Random) -> list[int]:
    tokens = [ask.cached.get(node.url, 0) for node in nodes]
    least = max(1, min(nlargest(_HOLDERS, tokens)))
    holders = [at for at, each in enumerate(tokens) if each >= least]
    if len(holders) <= _HOLDERS:
        return holders
    # Many may have the same: a system prompt is everywhere. Then any of them will do.
    more = [at for at in holders if tokens[at] > least]
    return more + rng.sample([at for at in holders if tokens[at] == least], _HOLDERS - len(more))
