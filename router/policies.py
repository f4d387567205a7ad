"""Simple rules by which an operator may have the nodes of a role chosen. Pure.

The price (router/placement.py) is no policy: it chooses both nodes of a request at once. A policy
chooses the node of one role by one rule, for those who want to predict by hand.

Affinity ends at a bound, which is each node's own: a node that is overloaded sends its requests
elsewhere, and all others keep theirs. (Peers compare the deepest and the shallowest queue and turn
affinity off for the whole fleet.)

Refuses to own: which nodes may be chosen at all (router/nodes/pool.py), and any socket, clock or
random source.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

import msgspec

from kvrelay.wire.config import Role

__all__ = [
    "POLICIES",
    "Ask",
    "NodeView",
    "Policy",
    "least_queue",
    "most_depth",
    "prefix",
    "round_robin",
    "session",
]

# consistent hashing with bounded loads, Mirrokni et al. 2016: moves little, evens out much
_MOST_OVER_MEAN = 1.25
_SLACK = 2.0  # requests: with short queues chance alone makes larger differences than the factor
_ALL_BITS = (1 << 64) - 1


class Ask(msgspec.Struct, frozen=True):
    """A leg that wants a node. `model` may name an adapter; empty stands for whatever is served."""

    role: Role
    model: str = ""
    session: str = ""
    """What requests of one conversation or user have in common; empty if nothing is known."""
    cached: Mapping[str, int] = {}
    """By URL of a node, how many tokens of this prompt it is believed to have. Nodes that are not
    named have none.
    """


class NodeView(Protocol):
    """A node as a policy knows it."""

    url: str
    turn: int
    """When it was last chosen: the number of that choice, counted from 1."""

    @property
    def depth(self) -> float:
        """Its queue, in requests; prompts that wait count by their length."""
        ...


N = TypeVar("N", bound=NodeView)


class Policy(Protocol):
    """A choice of one of `nodes`, of which there is at least one, that changes none. All randomness
    is of `rng`.
    """

    def __call__(self, ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
        """Return the chosen one."""
        ...


def least_queue(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Return the node with the least depth, ties broken by `rng`."""
    depths = [node.depth for node in nodes]
    least = min(depths)
    return nodes[rng.choice([at for at, depth in enumerate(depths) if depth == least])]


def round_robin(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Return the node that was chosen longest ago; of those that never were, the first."""
    return min(nodes, key=lambda node: node.turn)


def prefix(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Return the shortest queue of those with the longest cached prefix whose queue is within the
    bound.
    """
    within = _within_bound(nodes)
    longest = max(ask.cached.get(node.url, 0) for node in within)
    return least_queue(
        ask, [node for node in within if ask.cached.get(node.url, 0) == longest], rng
    )


def session(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """Return the session's first node whose queue is within the bound; without a session the
    shortest queue.

    By rendezvous hashing (Thaler and Ravishankar 1998): the choice needs no memory, is the same in
    every router, and changes for a session only if its own node leaves, a node joins that comes
    before it, or its queue is too deep.
    """
    if not ask.session:
        return least_queue(ask, nodes, rng)
    key = _hash(ask.session) | 1
    return max(_within_bound(nodes), key=lambda node: (_hash(node.url) * key) & _ALL_BITS)


POLICIES: Mapping[str, Policy] = {
    "least_queue": least_queue,
    "prefix": prefix,
    "round_robin": round_robin,
    "session": session,
}
"""By the names that an operator gives them."""


def most_depth(nodes: Iterable[NodeView]) -> float:
    """Return the depth up to which a node is chosen for what it has, whatever the others do. Some
    node is below.
    """
    depths = [node.depth for node in nodes]
    return _MOST_OVER_MEAN * sum(depths) / len(depths) + _SLACK


def _within_bound(nodes: Sequence[N]) -> list[N]:
    most = most_depth(nodes)
    return [node for node in nodes if node.depth <= most]


@lru_cache(maxsize=1 << 16)
def _hash(name: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little"
    )
