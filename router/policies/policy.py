"""What a policy is given, and what it must answer. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from router.nodes.rates import NodeRates
from wire.config import Role

__all__ = ["TOKENS_PER_REQUEST", "Ask", "N", "NodeView", "Policy"]

# One request weighs as much as this many uncomputed tokens: a prompt of 5,120 tokens delays its successor about as long
# as ten short requests do.
TOKENS_PER_REQUEST = 512


class Ask(msgspec.Struct, frozen=True):
    """A leg that wants a node. `model` may name an adapter; empty stands for whatever is served. Counts are tokens."""

    role: Role
    model: str = ""
    tokens: int = 0
    """To compute before the leg can answer, if the node has nothing of them."""
    kv_tokens: int = 0
    """Whose KV the node must have room for when the leg begins, if more than `tokens`: it fetches the others."""
    output_tokens: int = 0
    """The most that the leg may generate; 0: nobody has said."""
    priority: int = 0
    """As the client gave it; the lower is served first."""
    session: str = ""
    """What requests of one conversation or user have in common; empty if nothing is known."""
    prefix: Any = None
    """By what the prefix index knows the prompt; nobody else looks into it."""
    cached: Mapping[str, int] = {}
    """By URL of a node, how many tokens of this prompt it is believed to have. Nodes that are not named have none."""
    peer: str = ""
    """For a decode leg, the URL of the prefill node that has the KV, or will have it."""
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    """Targets of the request; 0: none."""
    informed: bool = False
    """`cached` and `tokens` are what the prefix index has said."""

    def uncached(self, node: NodeView) -> int:
        """Tokens that this node would have to compute."""
        return max(0, self.tokens - self.cached.get(node.url, 0))

    def kv_needed(self, node: NodeView) -> int:
        """Tokens whose KV finds no place there yet."""
        return max(0, max(self.tokens, self.kv_tokens) - self.cached.get(node.url, 0))


@dataclass(eq=False, slots=True)
class NodeView:
    """What the choice knows of a node. The router's own Node is one, kept up to date, so that a choice copies nothing.

    `requests` are queued or running, `tokens` yet to be computed for them. Two views are never equal.
    """

    url: str
    requests: int = 0
    tokens: int = 0
    kv_room: float = float("inf")
    """Tokens of KV that still find room, less what legs on their way will take; infinite if the node says nothing."""
    context_tokens: int = 0
    """Tokens of KV that the running requests have, together."""
    turn: int = 0
    """When it was last chosen: the number of that choice, counted from 1."""
    rates: NodeRates = field(default_factory=NodeRates)

    @property
    def certain_requests(self) -> int:
        """`requests`, as far as they are surely there."""
        return self.requests

    @property
    def certain_tokens(self) -> int:
        """`tokens`, as far as they are surely there."""
        return self.tokens

    @property
    def depth(self) -> float:
        """Queue depth in requests; waiting tokens count as TOKENS_PER_REQUEST to one."""
        return self.requests + self.tokens / TOKENS_PER_REQUEST


N = TypeVar("N", bound=NodeView)


class Policy(Protocol):
    """Chooses one of `nodes`, of which there is at least one, and changes none. All randomness comes from `rng`."""

    def __call__(self, ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
        """The chosen one."""
        ...
