"""What the router tells of its nodes and models, as plain values: the bodies of GET /health and GET /admin/nodes."""

from __future__ import annotations

from typing import Any

import msgspec

from router.console.picture import Health
from router.node_load import UNKNOWN
from router.nodes.models import Models
from router.nodes.node import Node
from router.nodes.pairs import Met
from router.nodes.pool import Pool
from wire.config import Role

__all__ = ["health_of", "node_of", "of_models"]

_MOST_SHOWN = 20


def node_of(node: Node, pool: Pool, now: float) -> dict[str, Any]:
    """One node: what it is, who names it, what runs there, and whether it is known what it holds (`kv_events`)."""
    return {
        "url": node.url,
        "role": node.role,
        "flips_to": node.flips_to,
        "kind": node.kind,
        "up": node.up,
        "for_s": round(now - node.since, 3) if node.since else None,
        "reason": node.reason,
        "model": node.model,
        "adapters": sorted(node.adapters),
        "generation": node.generation,
        "release": node.release,
        "leg_version": node.leg_version,
        "sources": pool.members.sources(node.url) if node.wanted else [],
        "legs": len(node.leases),
        "held_blocks": node.held_blocks,
        "kv_events": pool.prefixes.trusts(node.url),
        "queue_depth": round(node.depth, 3),
        "prompt_share": round(node.state.prompt_share, 3),
        "limit_left": round(node.state.limit_left, 3),
        "costs": None if node.state.costs is UNKNOWN else msgspec.structs.asdict(node.state.costs),
        "load": msgspec.structs.asdict(node.load),
        "breakers": {leg: breaker.facts(now) for leg, breaker in node.breakers.items()},
    }


def of_models(models: Models) -> tuple[Health, dict[str, bool]]:
    """Whether requests for any model can be served now, and for which."""
    by_model = models.ready()
    ready = any(by_model.values())
    return Health.OK if ready else Health.DEGRADED if models.alone() else Health.UNAVAILABLE, by_model


def health_of(pool: Pool, models: Models, met: Met, requests: int, now: float) -> tuple[bool, dict[str, Any]]:
    """Whether requests for any model can be served now; and the state of every model and node.

    `status` is "degraded" if no model has both a prefill and a decode node, and a decode node answers alone."""
    counts = {
        role.value: {"up": len(pool.up(role)), "listed": sum(node.role == role for node in pool.nodes)}
        for role in (Role.PREFILL, Role.DECODE)
    }
    status, by_model = of_models(models)
    nodes = [node_of(node, pool, now) for node in (*pool.nodes, *pool.leaving)]
    count, apart = met
    failed = [{"prefill": prefill, "decode": decode, "reason": why} for prefill, decode, why in apart[:_MOST_SHOWN]]
    body = {
        "status": status,
        **counts,
        "models": by_model,
        "pairs": {"met": count, "failed": failed},
        "requests": requests,
        "nodes": nodes,
    }
    return status is not Health.UNAVAILABLE, body
