"""The console's snapshot, joined from all workers.

The type is the contract of GET /console/state. Requests are summed; what each process finds out by
itself (is a node up, its breakers) is shown as the worst that any sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.router.state import Health, NodeStatus, RoleStatus, WorkerStatus, joined_nodes
from kvrelay.router.timeline import EndedRequest
from kvrelay.wire.versions import RELEASE

__all__ = ["KEPT_REQUESTS", "Snapshot", "snapshot_of"]

KEPT_REQUESTS = 200
"""Requests that each process remembers, without prompt, answer and body; the newest are told."""


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot of the cluster. Of `wanted` processes `workers` have answered."""

    now: float
    uptime_s: float
    health: Health
    models: dict[str, bool]
    wanted: int
    workers: int
    nodes: list[NodeStatus]
    counts: dict[str, float]
    """Now, or since the start of the processes that run."""
    requests: list[EndedRequest]
    roles: list[RoleStatus]
    version: str = RELEASE


def snapshot_of(own: WorkerStatus, workers: Sequence[WorkerStatus], **about: Any) -> Snapshot:
    """Join what all workers see; `own` is the process that is asked, which need not be a worker."""
    requests = [request for each in workers for request in each.requests]
    counts: Counter[str] = Counter()
    for each in workers:
        counts.update(each.counts)
    return Snapshot(
        workers=len(workers),
        nodes=joined_nodes(own, workers),
        counts=dict(counts),
        requests=sorted(requests, key=lambda each: -each.ended)[:KEPT_REQUESTS],
        roles=own.roles,
        **about,
    )
