"""The console's snapshot, joined from all workers.

The types are the contract of GET /console/state. Requests are summed; what each process finds out
by itself (is a node up, its breakers) is shown as the worst that any sees.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client.registry import Collector

from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.roles import RoleChanger
from kvrelay.router.state import (
    Health,
    Models,
    NodeStatus,
    RoleStatus,
    Shared,
    WorkerStatus,
    joined_nodes,
    model_health,
    node_statuses,
)
from kvrelay.router.timeline import EndedRequest
from kvrelay.wire.versions import RELEASE

__all__ = ["KEPT_REQUESTS", "ConsoleState", "Snapshot", "snapshot_of"]

KEPT_REQUESTS = 200
"""Requests that each process remembers."""
_MOST_EDGES = 200
_SHARES = (0.5, 0.9, 0.99)


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot of the cluster. Of `wanted` processes `workers` have answered."""

    now: float
    version: str
    health: Health
    models: dict[str, bool]
    wanted: int
    workers: int
    uptime_s: float
    """Seconds that the oldest has run."""
    running: int
    waiting: int
    waiting_for_room: int
    ttft: list[float]
    """Seconds at 50, 90 and 99 % of the remembered requests, also the next two."""
    inter_token: list[float]
    total: list[float]
    nodes: list[NodeStatus]
    edges: list[tuple[str, str, int]]
    """Prefill node, decode node and hand-overs of the remembered requests."""
    counts: dict[str, dict[str, float]]
    """Since the start of the processes that run: by metric, then by label value."""
    requests: list[EndedRequest]
    roles: list[RoleStatus] = []


def snapshot_of(
    own: WorkerStatus,
    workers: Sequence[WorkerStatus],
    since: float,
    *,
    wanted: int,
    health: Health,
    models: dict[str, bool],
    now: float,
) -> Snapshot:
    """Join what all workers see; only requests that ended after `since` are listed.

    `own` is the process that is asked, which need not be a worker.
    """
    requests = sorted(
        (each for of in workers for each in of.requests), key=lambda each: -each.ended
    )
    counts: dict[str, Counter[str]] = {}
    for each in workers:
        for what, by_label in each.counts.items():
            counts.setdefault(what, Counter()).update(by_label)
    return Snapshot(
        now=now,
        version=RELEASE,
        health=health,
        models=models,
        wanted=wanted,
        workers=len(workers),
        uptime_s=max((each.uptime_s for each in workers), default=0.0),
        running=sum(each.running for each in workers),
        waiting=sum(each.waiting for each in workers),
        waiting_for_room=sum(each.waiting_for_room for each in workers),
        ttft=_percentiles(each.ttft_s for each in requests),
        inter_token=_percentiles(each.inter_token_s for each in requests),
        total=_percentiles(each.stages_s["total"] for each in requests if each.status < 400),
        nodes=joined_nodes(own, workers),
        edges=_edges(requests),
        counts={what: dict(by_label) for what, by_label in counts.items()},
        requests=[each for each in requests if each.ended > since][:KEPT_REQUESTS],
        roles=own.roles,
    )


def _percentiles(times: Iterable[float | None]) -> list[float]:
    known = sorted(each for each in times if each is not None)
    return [known[math.ceil(share * len(known)) - 1] for share in _SHARES] if known else []


def _edges(requests: Iterable[EndedRequest]) -> list[tuple[str, str, int]]:
    handovers = Counter(
        (each.prefill, each.decode)
        for each in requests
        if not each.local and "-" not in (each.prefill, each.decode)
    )
    return [(*pair, times) for pair, times in handovers.most_common(_MOST_EDGES)]


class ConsoleState:
    """A process's state for the console; no prompt, answer or body is kept."""

    def __init__(self, pool: Pool, models: Models, metrics: Metrics, shared: Shared) -> None:
        self._pool, self._models = pool, models
        self._metrics, self._shared = metrics, shared
        self.requests: deque[EndedRequest] = deque(maxlen=KEPT_REQUESTS)
        self._began = time.monotonic()
        self.roles: RoleChanger | None = None
        """Set in the process that changes the roles of nodes."""

    def status(self) -> WorkerStatus:
        now, metrics = time.monotonic(), self._metrics
        roles = {} if self.roles is None else self.roles.models
        return WorkerStatus(
            now - self._began,
            int(sum(metrics.running().values())),
            int(sum(metrics.admission.waiting().values())),
            int(sum(metrics.waiting_for_room().values())),
            node_statuses(self._pool, now),
            list(self.requests),
            {
                "requests": _by(metrics.requests, "status"),
                "output_tokens": _by(metrics.output_tokens, ""),
            },
            [RoleStatus(name, each.why, each.use) for name, each in sorted(roles.items())],
        )

    def snapshot(self, since: float) -> Snapshot:
        workers, own = self._shared.workers(), self.status()
        health, models = model_health(self._models)
        return snapshot_of(
            own,
            self._shared.other_workers() or [own],
            since,
            wanted=1 if workers is None else workers["wanted"],
            health=health,
            models=models,
            now=time.time(),
        )


def _by(counter: Collector, label: str) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                counts[sample.labels.get(label, "")] += sample.value  # type: ignore[assignment]
    return dict(counts)
