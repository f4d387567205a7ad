"""What all walks of a router share, and whom they tell what the end of a leg means for its node."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from kvrelay.router.background import BackgroundTasks
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.breaker import BreakerCall
from kvrelay.router.nodes.health import NodeHealth
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.request.placer import Placer
from kvrelay.router.request.retries import RetryBudget
from kvrelay.router.transport.leg_watch import LegWatches
from kvrelay.router.transport.node_client import AttemptFailed, NodeClient, Refused
from kvrelay.wire.errors import Overloaded
from kvrelay.wire.router_config import RouterConfig

__all__ = ["RunContext"]

_log = logging.getLogger("kvrelay.router")


@dataclass(frozen=True, slots=True)
class RunContext:
    """Made when the router starts, and again for a new configuration."""

    pool: Pool
    node_health: NodeHealth
    placer: Placer
    node_client: NodeClient
    background: BackgroundTasks
    metrics: Metrics
    config: RouterConfig
    retries: RetryBudget = field(default_factory=RetryBudget)
    watches: LegWatches = field(default_factory=LegWatches)

    async def release(self, node: Node, request_id: str) -> None:
        """Tell a prefill node that nobody will fetch this KV."""
        told = await self.node_client.tell_of_kv(node, "release", request_id)
        self.metrics.releases.labels("yes" if told else "no").inc()

    def broke(self, job_id: str, lease: Lease, call: BreakerCall, why: AttemptFailed) -> None:
        """Note that a leg broke by its node's fault, or because the node drains, which is none."""
        node, now = lease.node, time.monotonic()
        if why.draining:
            self.pool.note_draining(node, now)
            return
        _log.warning("id=%s: the %s leg broke on %s: %s", job_id, lease.role, node.url, why.detail)
        if why.reading:
            return
        if node.up or not why.lost:  # a process that is lost with all of its legs has failed once
            self.node_health.failed(call, node, why.detail, now)
        if why.lost:
            self.pool.blame(node, f"a leg broke on it: {why.detail}", now)
        elif why.retry_after_s is not None:
            self.node_health.rest(node, lease.role, why.retry_after_s, now)

    def is_full(self, lease: Lease, why: Refused) -> bool:
        """Return whether the node has refused the leg for want of room: then it rests."""
        if why.status != Overloaded.status:
            return False
        self.node_health.rest(lease.node, lease.role, why.retry_after_s, time.monotonic())
        self.metrics.full.labels(lease.role.value).inc()
        return True

    def kv_did_not_come(self, peer: Node, node: Node, cause: str) -> None:
        """Note that the decode node has said so of the prefill node's KV."""
        self.metrics.kv_failures.labels(cause).inc()
        self.node_health.kv_failed(peer, node, cause, time.monotonic())
