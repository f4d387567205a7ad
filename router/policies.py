"""Simple rules to choose the nodes of one role. Pure.

Affinity ends at each node's own bound: an overloaded node sends its requests elsewhere, and all
others keep theirs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from kvrelay.router.nodes.node import Node
from kvrelay.router.placement import PlacementRequest

__all__ = ["POLICIES", "Policy", "prefix", "round_robin", "session"]

# consistent hashing with bounded loads, Mirrokni et al. 2016
_MOST_OVER_MEAN = 1.25
_SLACK = 2.0  # requests: in short queues chance alone exceeds the factor
_ALL_BITS = (1 << 64) - 1

Policy = Callable[[PlacementRequest, Sequence[Node], random.Random], Node]


def least_queue(request: PlacementRequest, nodes: Sequence[Node], rng: random.Random) -> Node:
    """Return the node with the shortest queue, ties broken by `rng`."""
    return min(nodes, key=lambda node: (node.state.depth, rng.random()))


def round_robin(request: PlacementRequest, nodes: Sequence[Node], rng: random.Random) -> Node:
    """Return the node chosen longest ago, or the first that never was."""
    return min(nodes, key=lambda node: node.turn)


def prefix(request: PlacementRequest, nodes: Sequence[Node], rng: random.Random) -> Node:
    """Return a node with the longest cached prefix, of those whose queue is within the bound."""
    within, cached = _within_bound(nodes), request.cached
    return min(within, key=lambda node: (-cached.get(node.url, 0), node.state.depth, rng.random()))


def session(request: PlacementRequest, nodes: Sequence[Node], rng: random.Random) -> Node:
    """Return the session's node; without a session the node with the shortest queue.

    By rendezvous hashing (Thaler and Ravishankar 1998): the choice is the same in every router, and
    changes only if the session's node leaves, a node that comes before it joins, or its queue is
    too deep.
    """
    if not request.session:
        return least_queue(request, nodes, rng)
    key = _hash(request.session) | 1
    return max(_within_bound(nodes), key=lambda node: (_hash(node.url) * key) & _ALL_BITS)


POLICIES: Mapping[str, Policy] = {
    "least_queue": least_queue,
    "prefix": prefix,
    "round_robin": round_robin,
    "session": session,
}


def _within_bound(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes up to whose depth affinity holds; there is always one."""
    most = _MOST_OVER_MEAN * sum(node.state.depth for node in nodes) / len(nodes) + _SLACK
    return [node for node in nodes if node.state.depth <= most]


@lru_cache(maxsize=1 << 16)
def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
