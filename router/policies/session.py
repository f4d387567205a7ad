"""All requests of a session to one node: rendezvous hashing (Thaler and Ravishankar 1998) with a bounded load.

The choice needs no memory, is the same in every router, and changes for a session only if its own node leaves, a node
joins that comes before it, or its queue is too deep.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache

from router.policies.bound import most_depth
from router.policies.least_queue import least_queue
from router.policies.policy import Ask, N

__all__ = ["session"]

_ALL_BITS = (1 << 64) - 1


def session(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """The session's first node whose queue is within the bound; without a session the shortest queue."""
    if not ask.session:
        return least_queue(ask, nodes, rng)
    key = _hash(ask.session) | 1
    most = most_depth(nodes)
    return max((node for node in nodes if node.depth <= most), key=lambda node: (_hash(node.url) * key) & _ALL_BITS)


@lru_cache(maxsize=1 << 16)
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
