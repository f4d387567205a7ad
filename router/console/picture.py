"""The picture that the console shows: what each worker process sees, put together. Pure; the types are the contract of
GET /console/state and of what workers tell each other for it.

What one process knows best is taken from it: legs, waiting requests and ended ones are added up. What each finds out by
itself (is a node up, its breakers) is told as the worst that any sees, with how many see the node up. A node's own
report is what the process that is asked was last told: with several workers their parent.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from router.console.recent import SLOT_S, SLOTS, Edge, Ended, Slot, quantile
from wire.config import Role

__all__ = [
    "EDGE_WINDOW_S",
    "BreakerSeen",
    "EdgeRow",
    "FailedPair",
    "Health",
    "NodeSeen",
    "Percentiles",
    "Picture",
    "RoleChange",
    "RolesSeen",
    "Series",
    "WorkerRow",
    "WorkerSeen",
    "picture_of",
]

EDGE_WINDOW_S = 60.0
_RATE_SLOTS = 2
_MOST_EDGES = 200
_MOST_REQUESTS = 200
_SHARES = (0.5, 0.9, 0.99)
_WORST = {"closed": 0, "half_open": 1, "open": 2}


class BreakerSeen(msgspec.Struct, frozen=True):
    """Of a node for one kind of leg."""

    state: str
    reason: str = ""
    opens_in_s: float = 0.0


class NodeSeen(msgspec.Struct, frozen=True):
    """One node. Load as it has last told; `legs` of the router's are there now."""

    url: str
    role: str
    kind: str
    model: str
    adapters: list[str]
    up: bool
    draining: bool
    reason: str
    """Why it is not up."""
    for_s: float | None
    sources: list[str]
    legs: int
    held_blocks: int
    queue_depth: float
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    block_size: int
    breakers: dict[str, BreakerSeen]
    up_in: int = 1
    """So many workers see it up."""
    flips_to: str = ""
    """The role that it is changing to."""
    prompt_share: float = 0.0
    """Of its time, what prompts take that come."""
    limit_left: float = 0.0
    """Of its time, what is left for prompts until tokens take too long there."""


class FailedPair(msgspec.Struct, frozen=True):
    """Two nodes that could not hand a block over when they were asked to."""

    prefill: str
    decode: str
    reason: str


class RoleChange(msgspec.Struct, frozen=True):
    """A decision that a node should take a role, and what the node answered."""

    at: float
    """Unix time."""
    role: str
    node: str
    why: str
    outcome: str


class RolesSeen(msgspec.Struct, frozen=True):
    """The roles of one model's nodes."""

    model: str
    why: str
    """Why nothing changes now, or what does."""
    use: dict[Role, float]
    """What its work takes of the nodes of each role."""
    changes: list[RoleChange]
    """The newest first."""


class WorkerSeen(msgspec.Struct, frozen=True):
    """What one process sees. `counts` are since its start: by what, then by a label's value."""

    index: int
    uptime_s: float
    running: int
    waiting: int
    waiting_for_room: int
    nodes: list[NodeSeen]
    slots: list[Slot]
    requests: list[Ended]
    counts: dict[str, dict[str, float]]
    failed_pairs: list[FailedPair]
    roles: list[RolesSeen] = []
    """By model; of the process that has nodes change."""


class WorkerRow(msgspec.Struct, frozen=True):
    """One process, in short."""

    index: int
    uptime_s: float
    running: int
    waiting: int
    nodes_up: int


class Percentiles(msgspec.Struct, frozen=True):
    """Of `count` requests; None: of none."""

    count: int
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None


class Series(msgspec.Struct, frozen=True):
    """By slots of `slot_s`, the oldest first; the last is not over yet."""

    slot_s: float
    ended: list[int]
    failed: list[int]
    output_tokens: list[int]
    ttft_p50_s: list[float | None]
    inter_token_p50_s: list[float | None]


class EdgeRow(msgspec.Struct, frozen=True):
    """What went from a prefill to a decode node within EDGE_WINDOW_S."""

    prefill: str
    decode: str
    handovers: int
    """As the router's metrics count them."""
    fetches: int
    """Ended ones of which the decode node has told; the next three are of these."""
    bytes: int
    transfer_s: float
    exposed_s: float


class Health(enum.StrEnum):
    """Whether requests for any model can be served: as GET /health has it."""

    OK = "ok"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


class Picture(msgspec.Struct, frozen=True):
    """All of it. `now` is the Unix time; `wanted` workers are to serve, those in `workers` have answered."""

    now: float
    version: str
    health: Health
    models: dict[str, bool]
    """By name, whether requests for it can be served."""
    wanted: int
    workers: list[WorkerRow]
    running: int
    waiting: int
    waiting_for_room: int
    requests_per_s: float
    output_tokens_per_s: float
    window_s: float
    """Of the percentiles and the series."""
    ttft: Percentiles
    inter_token: Percentiles
    total: Percentiles
    series: Series
    nodes: list[NodeSeen]
    edge_window_s: float
    edges: list[EdgeRow]
    failed_pairs: list[FailedPair]
    counts: dict[str, dict[str, float]]
    requests: list[Ended]
    """The newest first."""
    roles: list[RolesSeen] = []
    """By model."""


def picture_of(
    own: WorkerSeen,
    workers: Sequence[WorkerSeen],
    since: float,
    *,
    wanted: int,
    health: Health,
    models: dict[str, bool],
    version: str,
    now: float,
    monotonic: float,
) -> Picture:
    """Join what all workers see. `own`: what the process sees that is asked, which need not be a worker.

    `now` is the Unix time of `monotonic`; requests count as news that ended after `since`."""
    seen = sorted(workers, key=lambda each: each.index)
    slots = _joined([slot for each in seen for slot in each.slots])
    rows = [
        WorkerRow(each.index, each.uptime_s, each.running, each.waiting, sum(node.up for node in each.nodes))
        for each in seen
    ]
    requests = (request for each in seen for request in each.requests if request.ended > since)
    newest = sorted(requests, key=lambda each: -each.ended)
    return Picture(
        now=now,
        version=version,
        health=health,
        models=models,
        wanted=wanted,
        workers=rows,
        running=sum(each.running for each in seen),
        waiting=sum(each.waiting for each in seen),
        waiting_for_room=sum(each.waiting_for_room for each in seen),
        window_s=SLOT_S * SLOTS,
        nodes=_nodes(own, seen),
        edge_window_s=EDGE_WINDOW_S,
        edges=_edges(slots, monotonic),
        failed_pairs=own.failed_pairs,
        counts=_counts(seen),
        requests=newest[:_MOST_REQUESTS],
        roles=own.roles,
        **_figures(slots, monotonic),
    )


def _joined(slots: Sequence[Slot]) -> dict[int, list[Slot]]:
    """Of all workers, by number."""
    joined: dict[int, list[Slot]] = {}
    for slot in slots:
        joined.setdefault(slot.number, []).append(slot)
    return joined


def _figures(slots: dict[int, list[Slot]], monotonic: float) -> dict[str, Any]:
    """Rates, percentiles and series."""
    newest = int(monotonic // SLOT_S)
    by_slot = [slots.get(number, []) for number in range(newest - SLOTS + 1, newest + 1)]
    every = [slot for of_slot in by_slot for slot in of_slot]
    lately = [slot for of_slot in by_slot[-1 - _RATE_SLOTS :] for slot in of_slot]
    lately_s = _RATE_SLOTS * SLOT_S + monotonic % SLOT_S

    def median(spreads: list[dict[int, int]]) -> float | None:
        found = quantile(spreads, (0.5,))
        return None if found is None else round(found[0], 6)

    return {
        "requests_per_s": sum(slot.ended for slot in lately) / lately_s,
        "output_tokens_per_s": sum(slot.output_tokens for slot in lately) / lately_s,
        "ttft": _percentiles([slot.ttft for slot in every]),
        "inter_token": _percentiles([slot.inter_token for slot in every]),
        "total": _percentiles([slot.total for slot in every]),
        "series": Series(
            SLOT_S,
            [sum(slot.ended for slot in each) for each in by_slot],
            [sum(slot.failed for slot in each) for each in by_slot],
            [sum(slot.output_tokens for slot in each) for each in by_slot],
            [median([slot.ttft for slot in each]) for each in by_slot],
            [median([slot.inter_token for slot in each]) for each in by_slot],
        ),
    }


def _percentiles(spreads: list[dict[int, int]]) -> Percentiles:
    found = quantile(spreads, _SHARES)
    if found is None:
        return Percentiles(0)
    return Percentiles(sum(sum(each.values()) for each in spreads), *(round(each, 6) for each in found))


def _nodes(own: WorkerSeen, workers: Sequence[WorkerSeen]) -> list[NodeSeen]:
    rows = {node.url: node for node in own.nodes}
    up_in: Counter[str] = Counter()
    for each in workers:
        for node in each.nodes:
            up_in[node.url] += node.up
            known = rows.setdefault(node.url, node)
            if known is node or each is own:
                continue
            breakers = dict(known.breakers)
            for leg, breaker in node.breakers.items():
                if leg not in breakers or _WORST.get(breaker.state, 0) > _WORST.get(breakers[leg].state, 0):
                    breakers[leg] = breaker
            rows[node.url] = msgspec.structs.replace(known, legs=known.legs + node.legs, breakers=breakers)
    return [msgspec.structs.replace(row, up_in=up_in[row.url]) for row in rows.values()]


def _edges(slots: dict[int, list[Slot]], monotonic: float) -> list[EdgeRow]:
    first = int((monotonic - EDGE_WINDOW_S) // SLOT_S)
    sums: dict[tuple[str, str], Edge] = {}
    for number, of_slot in slots.items():
        if number <= first:
            continue
        for slot in of_slot:
            for pair, edge in slot.edges.items():
                sums.setdefault(pair, Edge()).add(edge)
    rows = [
        EdgeRow(*pair, edge.handovers, edge.fetches, edge.bytes, round(edge.transfer_s, 6), round(edge.exposed_s, 6))
        for pair, edge in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, -row.handovers))[:_MOST_EDGES]


def _counts(seen: Sequence[WorkerSeen]) -> dict[str, dict[str, float]]:
    counts: dict[str, dict[str, float]] = {}
    for each in seen:
        for what, by_label in each.counts.items():
            known = counts.setdefault(what, {})
            for label, count in by_label.items():
                known[label] = known.get(label, 0.0) + count
    return counts
