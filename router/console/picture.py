"""The picture that the console shows: what each worker process sees, put together. Pure; the types
are the contract of GET /console/state and of what workers tell each other for it.

What one process knows best is taken from it: legs, waiting requests and ended ones are added up.
What each finds out by itself (is a node up, its breakers) is told as the worst that any sees, with
how many see the node up. A node's own report is what the process that is asked was last told: with
several workers their parent.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from kvrelay.router.console.recent import (
    EDGE_SLOTS,
    KEPT_REQUESTS,
    SLOT_S,
    SLOTS,
    Edge,
    Ended,
    Slot,
    add,
    quantile,
    summed,
)
from kvrelay.router.nodes.breaker import BreakerState
from kvrelay.wire.config import Role
from kvrelay.wire.step_costs import StepCosts

__all__ = [
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
    "joined_nodes",
    "picture_of",
]

_RATE_SLOTS = 2
_MOST_EDGES = 200
_SHARES = (0.5, 0.9, 0.99)
_WORST = {"closed": 0, "half_open": 1, "open": 2}


class NodeSeen(msgspec.Struct, frozen=True):
    """One node, as GET /health and GET /admin/nodes tell it too. Load as it has last told; `legs`
    are there now.
    """

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
    sources: Sequence[str]
    """Who names it."""
    legs: int
    """Of the router's."""
    held_blocks: int
    queue_depth: float
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    block_size: int
    breakers: dict[Role, BreakerState]
    up_in: int = 1
    """So many workers see it up."""
    flips_to: str | None = None
    """The role that it is changing to."""
    prompt_share: float = 0.0
    """Of its time, what prompts take that come."""
    limit_left: float = 0.0
    """Of its time, what is left for prompts until tokens take too long there."""
    generation: str = ""
    release: str = ""
    leg_version: int = 1
    kv_events: bool = False
    """It is known what it holds."""
    costs: StepCosts | None = None
    load: dict[str, float] = {}


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
    edges: list[Edge]
    """Of the last EDGE_SLOTS; the slots have none."""
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


class Health(enum.StrEnum):
    """Whether requests for any model can be served: as GET /health has it."""

    OK = "ok"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


class Picture(msgspec.Struct, frozen=True):
    """All of it. `now` is the Unix time; `wanted` workers are to serve, those in `workers` have
    answered.
    """

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
    edges: list[Edge]
    """Within `edge_window_s`."""
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
    """Join what all workers see. `own`: what the process sees that is asked, which need not be a
    worker.

    `now` is the Unix time of `monotonic`; requests count as news that ended after `since`.
    """
    seen = sorted(workers, key=lambda each: each.index)
    requests = (request for each in seen for request in each.requests if request.ended > since)
    of_all = [slot for each in seen for slot in each.slots]
    newest = int(monotonic // SLOT_S)
    slots = [
        summed(slot for slot in of_all if slot.number == number)
        for number in range(newest - SLOTS + 1, newest + 1)
    ]
    whole, lately = summed(slots), summed(slots[-1 - _RATE_SLOTS :])
    lately_s = _RATE_SLOTS * SLOT_S + monotonic % SLOT_S
    edges: dict[tuple[str, str], Edge] = {}
    for edge in (edge for each in seen for edge in each.edges):
        edges.setdefault((edge.prefill, edge.decode), Edge(edge.prefill, edge.decode)).add(edge)
    counts: dict[str, dict[str, float]] = {}
    for each in seen:
        for what, by_label in each.counts.items():
            add(counts.setdefault(what, {}), by_label)
    return Picture(
        now=now,
        version=version,
        health=health,
        models=models,
        wanted=wanted,
        workers=[
            WorkerRow(
                each.index,
                each.uptime_s,
                each.running,
                each.waiting,
                sum(node.up for node in each.nodes),
            )
            for each in seen
        ],
        running=sum(each.running for each in seen),
        waiting=sum(each.waiting for each in seen),
        waiting_for_room=sum(each.waiting_for_room for each in seen),
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
        nodes=joined_nodes(own, seen),
        edge_window_s=SLOT_S * EDGE_SLOTS,
        edges=sorted(edges.values(), key=lambda edge: (-edge.bytes, -edge.handovers))[:_MOST_EDGES],
        failed_pairs=own.failed_pairs,
        counts=counts,
        requests=sorted(requests, key=lambda each: -each.ended)[:KEPT_REQUESTS],
        roles=own.roles,
    )


def _percentiles(spread: Mapping[int, int]) -> Percentiles:
    return Percentiles(sum(spread.values()), *(quantile(spread, share) for share in _SHARES))


def joined_nodes(own: WorkerSeen, workers: Sequence[WorkerSeen]) -> list[NodeSeen]:
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
                if leg not in breakers or _WORST.get(breaker.state, 0) > _WORST.get(
                    breakers[leg].state, 0
                ):
                    breakers[leg] = breaker
            rows[node.url] = msgspec.structs.replace(
                known,
                legs=known.legs + node.legs,
                breakers=breakers,
                kv_events=known.kv_events or node.kv_events,
            )
    return [msgspec.structs.replace(row, up_in=up_in[row.url]) for row in rows.values()]
