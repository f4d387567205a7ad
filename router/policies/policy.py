"""What a policy is given, and what it must answer. Pure.

The price (router/placement.py) is no policy: it chooses both nodes of a request at once. A policy chooses the node of
one role by one simple rule, for those who want to predict by hand.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from wire.config import Role

__all__ = ["Ask", "N", "NodeView", "Policy"]


class Ask(msgspec.Struct, frozen=True):
    """A leg that wants a node. `model` may name an adapter; empty stands for whatever is served."""

    role: Role
    model: str = ""
    session: str = ""
    """What requests of one conversation or user have in common; empty if nothing is known."""
    cached: Mapping[str, int] = {}
    """By URL of a node, how many tokens of this prompt it is believed to have. Nodes that are not named have none."""


class NodeView(Protocol):
    """What a policy knows of a node."""

    url: str
    turn: int
    """When it was last chosen: the number of that choice, counted from 1."""

    @property
    def depth(self) -> float:
        """Its queue, in requests; prompts that wait count by their length."""
        ...


N = TypeVar("N", bound=NodeView)


class Policy(Protocol):
    """A choice of one of `nodes`, of which there is at least one, that changes none. All randomness is of `rng`."""

    def __call__(self, ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
        """Return the chosen one."""
        ...
