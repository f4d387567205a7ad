"""Each node in turn. A node's own `turn` is the state, so nodes may come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import attrgetter

from router.policies.policy import Ask, N

__all__ = ["round_robin"]

_turn = attrgetter("turn")


def round_robin(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """The one that was chosen longest ago; of those that never were, the first."""
    return min(nodes, key=_turn)
