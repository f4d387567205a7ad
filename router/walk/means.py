"""What all walks of a router share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.chores import Chores
from router.legs.leg_watch import LegWatches
from router.legs.legs import Legs
from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.node import Node
from router.nodes.pool import Pool
from router.walk.placer import Placer
from router.walk.retries import RetryBudget
from wire.router_config import RouterConfig

__all__ = ["Means"]


@dataclass(frozen=True, slots=True)
class Means:
    """Made when the router starts, and again for a new configuration."""

    pool: Pool
    doors: Doors
    placer: Placer
    legs: Legs
    chores: Chores
    metrics: Metrics
    retries: RetryBudget
    watches: LegWatches
    attempts: int
    """On how many nodes a leg is tried."""
    deadline_s: float
    """Of a request, from its arrival."""

    def under(self, config: RouterConfig) -> Means:
        """The same under another configuration, for walks that begin from now on."""
        return replace(self, attempts=config.attempts, deadline_s=config.request_deadline_s)

    def release(self, node: Node, request_ids: Sequence[str]) -> None:
        """Have a prefill node told that nobody will fetch these."""
        self.chores.spawn(self._release(node, request_ids))

    async def _release(self, node: Node, request_ids: Sequence[str]) -> None:
        told = await self.legs.release(node, request_ids)
        self.metrics.releases.labels("yes" if told else "no").inc()
