"""What the router tells of its nodes and models, as plain values: the bodies of GET /health and GET
/admin/nodes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.router.console.picture import FailedPair, Health, NodeSeen
from kvrelay.router.membership.warm_up import WarmPairs
from kvrelay.router.node_load import UNKNOWN
from kvrelay.router.nodes.models import Models
from kvrelay.router.nodes.node import Node
from kvrelay.router.nodes.pool import DRAINS, Pool
from kvrelay.wire.config import Role

__all__ = ["failed_pairs", "health_of", "node_of", "nodes_of", "of_models"]

_MOST_SHOWN = 20


def node_of(node: Node, pool: Pool, now: float) -> NodeSeen:
    """Return one node as it is told: what it is, who names it, what runs there."""
    load, state = node.load, node.state
    return NodeSeen(
        url=node.url,
        role=node.role,
        kind=node.kind,
        model=node.model,
        adapters=sorted(node.adapters),
        up=node.up,
        draining=not node.up and node.reason == DRAINS,
        reason=node.reason,
        for_s=round(now - node.since, 3) if node.since else None,
        sources=pool.members.sources(node.url) if node.wanted else [],
        legs=len(node.leases),
        held_blocks=node.held_blocks,
        queue_depth=round(node.depth, 3),
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        block_size=load.block_size,
        breakers={leg: breaker.shown(now) for leg, breaker in node.breakers.items()},
        up_in=int(node.up),
        flips_to=node.flips_to,
        prompt_share=round(state.prompt_share, 3),
        limit_left=round(state.limit_left, 3),
        generation=node.generation,
        release=node.release,
        leg_version=node.leg_version,
        kv_events=pool.prefixes.trusts(node.url),
        costs=None if state.costs is UNKNOWN else state.costs,
        load=msgspec.structs.asdict(load),
    )


def nodes_of(pool: Pool, now: float) -> list[NodeSeen]:
    """Return all nodes, also those that only end what they have."""
    return [node_of(node, pool, now) for node in (*pool.nodes, *pool.leaving)]


def failed_pairs(pairs: WarmPairs) -> list[FailedPair]:
    """Return the first of the pairs of nodes that could not meet."""
    return [FailedPair(*pair[:3]) for pair in pairs[1][:_MOST_SHOWN]]


def of_models(models: Models) -> tuple[Health, dict[str, bool]]:
    """Say whether requests for any model can be served now, and for which."""
    by_model = models.ready()
    return Health.OK if any(
        by_model.values()
    ) else Health.DEGRADED if models.alone() else Health.UNAVAILABLE, by_model


def health_of(
    pool: Pool, models: Models, pairs: WarmPairs, requests: int, now: float
) -> tuple[bool, dict[str, Any]]:
    """Say whether requests for any model can be served now; and the state of every model and node.

    `status` is "degraded" if no model has both a prefill and a decode node, and a decode node
    answers alone.
    """
    counts = {
        role.value: {
            "up": len(pool.up(role)),
            "listed": sum(node.role == role for node in pool.nodes),
        }
        for role in (Role.PREFILL, Role.DECODE)
    }
    status, by_model = of_models(models)
    body = {
        "status": status,
        **counts,
        "models": by_model,
        "pairs": {"met": pairs[0], "failed": failed_pairs(pairs)},
        "requests": requests,
        "nodes": nodes_of(pool, now),
    }
    return status is not Health.UNAVAILABLE, body
