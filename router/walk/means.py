"""What all walks of a router share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.chores import Chores
from router.legs.leg_watch import LegWatches
from router.legs.legs import Legs
from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.node import Node
from router.nodes.pool import Pool
from router.walk.binding import Binding
from router.walk.locality import Locality
from router.walk.retries import RetryBudget

__all__ = ["Means"]


@dataclass(frozen=True, slots=True)
class Means:
    """Made once, when the router starts."""

    pool: Pool
    doors: Doors
    binding: Binding
    locality: Locality
    legs: Legs
    chores: Chores
    metrics: Metrics
    retries: RetryBudget
    watches: LegWatches
    attempts: int
    """On how many nodes a leg is tried."""
    deadline_s: float
    """Of a request, from its arrival."""

    def release(self, node: Node, request_ids: Sequence[str]) -> None:
        """Have a prefill node told that nobody will fetch these."""
        self.chores.spawn(self._release(node, request_ids))

    async def _release(self, node: Node, request_ids: Sequence[str]) -> None:
        told = await self.legs.release(node, request_ids)
        self.metrics.releases.labels("yes" if told else "no").inc()
