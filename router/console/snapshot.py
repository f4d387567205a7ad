"""The snapshot that the console shows, put together from what all workers see. Pure.

The types are the contract of GET /console/state. What one process knows best is taken from it:
requests that run, wait or have ended are added up. What each finds out by itself (is a node up, its
breakers) is shown as the worst that any sees, with how many see the node up. A node's own report is
what the process that is asked was last told: with several workers their parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvrelay.router.recent_requests import (
    EDGE_SLOTS,
    KEPT_REQUESTS,
    SLOT_S,
    SLOTS,
    Edge,
    EndedRequest,
    add,
    quantile,
    summed,
)
from kvrelay.router.state import (
    FailedPair,
    Health,
    NodeStatus,
    RoleStatus,
    WorkerStatus,
    joined_nodes,
)

__all__ = ["Percentiles", "Series", "Snapshot", "WorkerRow", "snapshot_of"]

_RATE_SLOTS = 2
_MOST_EDGES = 200
_SHARES = (0.5, 0.9, 0.99)


class WorkerRow(msgspec.Struct, frozen=True):
    """A process in short."""

    index: int
    uptime_s: float
    running: int
    waiting: int
    nodes_up: int


class Percentiles(msgspec.Struct, frozen=True):
    """A row of percentiles of `count` requests."""

    count: int
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None


class Series(msgspec.Struct, frozen=True):
    """A series by slots of `slot_s`, the oldest first; the last is not over yet."""

    slot_s: float
    ended: list[int]
    failed: list[int]
    output_tokens: list[int]
    ttft_p50_s: list[float | None]
    inter_token_p50_s: list[float | None]


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot of the cluster. Of `wanted` workers those in `workers` have answered."""

    now: float
    """Unix time."""
    version: str
    health: Health
    models: dict[str, bool]
    """By name, whether requests for the model can be served."""
    wanted: int
    workers: list[WorkerRow]
    running: int
    waiting: int
    waiting_for_room: int
    requests_per_s: float
    output_tokens_per_s: float
    window_s: float
    """The time that percentiles and series cover."""
    ttft: Percentiles
    inter_token: Percentiles
    total: Percentiles
    series: Series
    nodes: list[NodeStatus]
    edge_window_s: float
    edges: list[Edge]
    """The traffic within `edge_window_s`."""
    failed_pairs: list[FailedPair]
    counts: dict[str, dict[str, float]]
    requests: list[EndedRequest]
    """The newest first."""
    roles: list[RoleStatus] = []
    """By model."""


def snapshot_of(
    own: WorkerStatus,
    workers: Sequence[WorkerStatus],
    since: float,
    *,
    wanted: int,
    health: Health,
    models: dict[str, bool],
    version: str,
    now: float,
    monotonic: float,
) -> Snapshot:
    """Join what all workers see. `own` is the process that is asked, which need not be a worker.

    `now` is the Unix time of `monotonic`; only requests that ended after `since` are listed.
    """
    workers = sorted(workers, key=lambda each: each.index)
    requests = (request for each in workers for request in each.requests if request.ended > since)
    all_slots = [slot for each in workers for slot in each.slots]
    newest = int(monotonic // SLOT_S)
    slots = [
        summed(slot for slot in all_slots if slot.number == number)
        for number in range(newest - SLOTS + 1, newest + 1)
    ]
    whole, lately = summed(slots), summed(slots[-1 - _RATE_SLOTS :])
    lately_s = _RATE_SLOTS * SLOT_S + monotonic % SLOT_S
    return Snapshot(
        now=now,
        version=version,
        health=health,
        models=models,
        wanted=wanted,
        workers=[_row(each) for each in workers],
        running=sum(each.running for each in workers),
        waiting=sum(each.waiting for each in workers),
        waiting_for_room=sum(each.waiting_for_room for each in workers),
        requests_per_s=lately.ended / lately_s,
        output_tokens_per_s=lately.output_tokens / lately_s,
        window_s=SLOT_S * SLOTS,
        ttft=_percentiles(whole.ttft),
        inter_token=_percentiles(whole.inter_token),
        total=_percentiles(whole.total),
        series=Series(
            SLOT_S,
            [slot.ended for slot in slots],
            [slot.failed for slot in slots],
            [slot.output_tokens for slot in slots],
            [quantile(slot.ttft, 0.5) for slot in slots],
            [quantile(slot.inter_token, 0.5) for slot in slots],
        ),
        nodes=joined_nodes(own, workers),
        edge_window_s=SLOT_S * EDGE_SLOTS,
        edges=_joined_edges(workers),
        failed_pairs=own.failed_pairs,
        counts=_joined_counts(workers),
        requests=sorted(requests, key=lambda each: -each.ended)[:KEPT_REQUESTS],
        roles=own.roles,
    )


def _joined_counts(workers: Sequence[WorkerStatus]) -> dict[str, dict[str, float]]:
    counts: dict[str, dict[str, float]] = {}
    for each in workers:
        for what, by_label in each.counts.items():
            add(counts.setdefault(what, {}), by_label)
    return counts


def _joined_edges(workers: Sequence[WorkerStatus]) -> list[Edge]:
    edges: dict[tuple[str, str], Edge] = {}
    for edge in (edge for each in workers for edge in each.edges):
        edges.setdefault((edge.prefill, edge.decode), Edge(edge.prefill, edge.decode)).add(edge)
    return sorted(edges.values(), key=lambda edge: (-edge.bytes, -edge.handovers))[:_MOST_EDGES]


def _row(worker: WorkerStatus) -> WorkerRow:
    up = sum(node.up for node in worker.nodes)
    return WorkerRow(worker.index, worker.uptime_s, worker.running, worker.waiting, up)


def _percentiles(counts: Mapping[int, int]) -> Percentiles:
    return Percentiles(sum(counts.values()), *(quantile(counts, share) for share in _SHARES))
