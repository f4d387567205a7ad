"""What a policy is given, and what it must answer. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wire.config import Role

__all__ = ["TOKENS_PER_REQUEST", "Ask", "NodeView", "Policy"]

# One request weighs as much as this many uncomputed tokens: a prompt of 5,120 tokens delays its successor about as long
# as ten short requests do.
TOKENS_PER_REQUEST = 512


@dataclass(frozen=True, slots=True)
class Ask:
    """A leg that wants a node. `model` may name an adapter; empty stands for whatever is served."""

    role: Role
    model: str = ""
    tokens: int = 0
    """To compute before the leg can answer, if the node has nothing of them."""


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


class Policy(Protocol):
    """Chooses one of `nodes`, of which there is at least one. All randomness comes from `rng`."""

    def __call__(self, ask: Ask, nodes: Sequence[NodeView], rng: random.Random) -> NodeView:
        """The chosen one."""
        ...
