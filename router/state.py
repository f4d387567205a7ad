"""The router's view of nodes, models and processes, for operators and workers."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from kvrelay.openai_api.dialects.response_store import IN_MEMORY, ResponseStore
from kvrelay.openai_api.model_types import ModelCard
from kvrelay.router.node_load import UNKNOWN
from kvrelay.router.nodes.node import DRAINS, BreakerState, Node, NodeKind
from kvrelay.router.nodes.pool import LOOK, Pool
from kvrelay.router.request.failures import Poison
from kvrelay.router.timeline import EndedRequest
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode, NotFound
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.versions import RELEASE

__all__ = [
    "KEPT_REQUESTS",
    "Health",
    "Models",
    "NodeStatus",
    "RoleStatus",
    "Shared",
    "Snapshot",
    "WorkerStatus",
    "joined_nodes",
    "node_status",
    "node_statuses",
    "snapshot_of",
]

KEPT_REQUESTS = 200
"""Requests that each process remembers, without prompt, answer and body; the newest are told."""
_BY_SEVERITY = ("closed", "half_open", "open")
_OF_NODE = (
    "url",
    "role",
    "kind",
    "model",
    "up",
    "reason",
    "held_blocks",
    "flips_to",
    "generation",
    "release",
    "leg_version",
)


class NodeStatus(msgspec.Struct, frozen=True):
    """A node: load as it has last told; `legs` are the router's requests that run there now."""

    url: str
    role: str
    kind: str
    model: str
    adapters: list[str]
    up: bool
    draining: bool
    reason: str
    for_s: float | None
    sources: Sequence[str]
    legs: int
    held_blocks: int
    queue_depth: float
    breaker: BreakerState
    up_in: int = 1
    """How many workers see the node up."""
    flips_to: str | None = None
    prompt_share: float = 0.0
    """The share of the node's time that arriving prompts take."""
    limit_left: float = 0.0
    """The share of the node's time left for prompts until tokens take too long."""
    generation: str = ""
    release: str = ""
    leg_version: int = 1
    kv_events: bool = False
    """The router knows what the node's prefix cache holds."""
    costs: StepCosts | None = None
    load: dict[str, float] = {}


class RoleStatus(msgspec.Struct, frozen=True):
    model: str
    why: str
    """Why nothing changes now, or what does."""
    use: dict[Role, float]
    """The share of each role's nodes that the work takes."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """A process and what it sees; `counts` are now, or since its start."""

    nodes: list[NodeStatus]
    requests: list[EndedRequest]
    counts: dict[str, float]
    roles: list[RoleStatus] = []
    """Roles by model; only the process that changes roles has any."""
    refused: dict[str, tuple[float, float]] = {}
    """Placer.refused_work of this process."""


class Health(enum.StrEnum):
    """A cluster's health; DEGRADED: decode nodes answer alone, no model has both roles."""

    OK = "ok"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


def node_status(node: Node, pool: Pool, now: float) -> NodeStatus:
    state = node.state
    return NodeStatus(
        **{name: getattr(node, name) for name in _OF_NODE},
        adapters=sorted(node.adapters),
        draining=not node.up and node.reason == DRAINS,
        for_s=round(now - node.since, 3) if node.since else None,
        sources=pool.sources(node.url),
        legs=len(node.leases),
        queue_depth=round(state.depth, 3),
        breaker=node.breaker.shown(now),
        up_in=int(node.up),
        prompt_share=round(state.prompt_share, 3),
        limit_left=round(state.limit_left, 3),
        kv_events=pool.prefixes.follows(node.url),
        costs=None if state.costs is UNKNOWN else state.costs,
        load=msgspec.structs.asdict(state.load),
    )


def node_statuses(pool: Pool, now: float) -> list[NodeStatus]:
    """Return all nodes, also leaving ones."""
    return [node_status(node, pool, now) for node in (*pool.nodes, *pool.leaving)]


def joined_nodes(own: WorkerStatus, workers: Sequence[WorkerStatus]) -> list[NodeStatus]:
    """Return all nodes as all workers see them: requests are summed, breakers the worst."""
    rows = {node.url: node for each in (*workers, own) for node in each.nodes}
    seen = defaultdict[str, list[NodeStatus]](list)
    for each in workers:
        for node in each.nodes:
            seen[node.url].append(node)
    return [
        msgspec.structs.replace(
            row,
            legs=sum(node.legs for node in seen[url]),
            breaker=max(
                (node.breaker for node in seen[url] or [row]),
                key=lambda breaker: _BY_SEVERITY.index(breaker.state),
            ),
            kv_events=any(node.kv_events for node in seen[url]),
            up_in=sum(node.up for node in seen[url]),
        )
        for url, row in rows.items()
    ]


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot of the cluster, as GET /console/state tells it.

    Of `wanted` processes `workers` have answered.
    """

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


@dataclass(slots=True)
class Models:
    """A view of the names that requests may ask for: models, adapters, and aliases of both.

    An alias is resolved at once: nodes see the name that they serve, and the answer's `model` is
    it.
    """

    _pool: Pool
    aliases: Mapping[str, str]
    _created: int

    def named(self, name: str) -> str:
        """Return the model or adapter that a name means. Raises NotFound, NoNode."""
        meant = self.aliases.get(name, name)
        if self._pool.base_of(meant):
            return meant
        served = self.names()
        if not served or name in self.aliases:
            raise NoNode(f"no node has reported {meant!r} yet; try again, or {LOOK}")
        raise NotFound(
            f"model {name!r} is not served here; served: {', '.join(map(repr, served))}",
            param="model",
            code="model_not_found",
        )

    def names(self) -> list[str]:
        return [card.id for card in self.cards()]

    def cards(self) -> list[ModelCard]:
        cards = {
            name: ModelCard.create(name, self._created, longest)
            for name, longest in sorted(self._pool.models().items())
        }
        for name, parent in sorted(self._pool.adapters().items()):
            if name not in cards:
                cards[name] = cards[parent].named(name, parent=parent)
        for alias, meant in sorted(self.aliases.items()):
            if meant in cards:
                cards[alias] = cards[meant].named(alias, root=meant)
        return list(cards.values())

    def health(self) -> tuple[Health, dict[str, bool]]:
        """Return whether requests can be served now: for any model, and for each."""
        ready = {name: bool(self._pool.node_kinds(name)) for name in sorted(self._pool.models())}
        if any(ready.values()):
            return Health.OK, ready
        ours = self._pool.up(Role.DECODE, kind=NodeKind.KVRELAY)
        alone = any(node.kv is not None and node.kv.computes_prompts for node in ours)
        return Health.DEGRADED if alone else Health.UNAVAILABLE, ready


class Shared:
    """A router process's part in a group on one port; this one is alone.

    router/workers/worker.py overrides it in workers, router/workers/parent.py in their parent.
    """

    leads = True
    """True if this process changes the roles of nodes."""
    serves = True
    """True if this process answers requests and follows nodes' caches."""
    first_checks_s = 0.0
    """For so long it takes no connections while it has not checked all nodes."""
    forward: Callable[[Request], Awaitable[Response]] | None = None
    """Asks the leading process for operators and scrapers."""
    responses: ResponseStore
    """Set in processes that serve."""

    def __init__(self, responses: str = IN_MEMORY) -> None:
        self.poison = Poison()
        if self.serves:
            self.responses = ResponseStore(responses)

    def other_workers(self) -> Sequence[WorkerStatus]:
        """Return what the other processes see, as far as they answer requests."""
        return ()

    def exposition(self, own: CollectorRegistry) -> bytes:
        """Return the metrics of all processes in Prometheus's format."""
        return generate_latest(own)

    def workers(self) -> dict[str, int] | None:
        """Return the index of this process and the number of all; None: it is alone."""
        return None

    async def settled(self) -> None:
        """Wait until all processes have taken over what was changed here."""
