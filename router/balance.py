"""The choice of a node by queue depth. Pure: no sockets, no clock, the random source is an argument."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TOKENS_PER_REQUEST", "NodeView", "choose"]

# One request weighs as much as this many uncomputed tokens: a prompt of 5,120 tokens delays its successor about as long
# as ten short requests do.
TOKENS_PER_REQUEST = 512


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the choice knows of a node: requests in its queue or running, and tokens it has yet to compute for them."""

    url: str
    requests: int
    tokens: int

    @property
    def depth(self) -> float:
        """Queue depth in requests; waiting tokens count as TOKENS_PER_REQUEST to one."""
        return self.requests + self.tokens / TOKENS_PER_REQUEST


def choose(nodes: Sequence[NodeView], rng: random.Random) -> NodeView | None:
    """The node with the least depth, ties broken by `rng`; None if there is no node."""
    if not nodes:
        return None
    least = min(node.depth for node in nodes)
    return rng.choice([node for node in nodes if node.depth == least])
