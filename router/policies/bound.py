"""How deep a queue may be before affinity gives way. Pure.

The bound is each node's own: a node that is overloaded sends its requests elsewhere, and all others keep theirs. (Peers
compare the deepest and the shallowest queue and turn affinity off for the whole fleet.)
"""

from __future__ import annotations

from collections.abc import Iterable

from router.policies.policy import NodeView

__all__ = ["most_depth"]

_MOST_OVER_MEAN = 1.25  # consistent hashing with bounded loads, Mirrokni et al. 2016: moves little, evens out much
_SLACK = 2.0  # requests: with short queues chance alone makes larger differences than the factor


def most_depth(nodes: Iterable[NodeView]) -> float:
    """The depth up to which a node of these is chosen for what it has, whatever the others do. Some node is below."""
    depths = [node.depth for node in nodes]
    return _MOST_OVER_MEAN * sum(depths) / len(depths) + _SLACK
