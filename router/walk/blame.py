"""What the end of a leg means for its node, and for the pair that it was of: told to whoever keeps that."""

from __future__ import annotations

import logging
import time

from router.legs.legs import LegFailed, Refused
from router.nodes.node import Lease, Node
from router.nodes.passage import Passage
from router.walk.means import Means
from wire.config import Role
from wire.errors import Overloaded

__all__ = ["broke", "is_full", "kv_did_not_come"]

_log = logging.getLogger("kvrelay.router")


def broke(means: Means, job_id: str, lease: Lease, role: Role, passage: Passage, why: LegFailed) -> None:
    """The leg broke by its node's fault, or because the node drains, which is none."""
    node, now = lease.node, time.monotonic()
    if why.draining:
        means.pool.drains(node, now)
        return
    _log.warning("id=%s: the %s leg broke on %s: %s", job_id, role, node.url, why.detail)
    if why.reading:
        return
    if node.up or not why.lost:  # a process that is lost with all of its legs has failed once
        means.doors.failed(passage, node, why.detail, now)
    if why.lost:
        means.pool.blame(node, f"a leg broke on it: {why.detail}", now)
    elif why.retry_after_s is not None:
        means.doors.rest(node, role, why.retry_after_s, now)


def is_full(means: Means, lease: Lease, why: Refused) -> bool:
    """Whether the node has refused the leg for want of room: then it rests."""
    if why.status != Overloaded.status:
        return False
    means.doors.rest(lease.node, lease.role, why.retry_after_s, time.monotonic())
    means.metrics.full.labels(lease.role.value).inc()
    return True


def kv_did_not_come(means: Means, peer: Node, node: Node, cause: str) -> None:
    """The decode node has said so of the prefill node's KV."""
    means.metrics.kv_failures.labels(cause).inc()
    means.doors.kv_failed(peer, node, cause, time.monotonic())
