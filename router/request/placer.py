"""The placement of requests: what is known of one, which nodes may take it, and its leases."""

from __future__ import annotations

import functools
import math
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from kvrelay.router.node_load import UNKNOWN, Share, default_targets
from kvrelay.router.nodes.health import NodeHealth
from kvrelay.router.nodes.node import Lease, Node, NodeKind, kv_mismatch
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.placement import (
    Cluster,
    Placement,
    PlacementRequest,
    Refuse,
    Wait,
    fitting,
    place,
    place_decode,
    place_prefill,
    shares_of,
)
from kvrelay.router.policies import POLICIES
from kvrelay.router.prefix.index import Prefix
from kvrelay.router.request.job import Job, Slo
from kvrelay.wire.announced import FIRST_OUTPUT
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvNotLoaded, NoNode, Overloaded
from kvrelay.wire.router_config import PRICE, RouterConfig
from kvrelay.wire.step_costs import RunningMean
from kvrelay.wire.transfer import KvFacts

__all__ = ["ChosenNodes", "PlacementLeases", "Placer", "PlacementQuery"]

_OUTPUTS_MEAN = 64
_MOST_OUTPUT = 16_384.0
# A target counts within these factors of what such nodes' users expect, or it would buy priority.
_LEAST_TARGET, _MOST_TARGET = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    model: str
    request: PlacementRequest
    prefix: Prefix | None
    peer: Node | None
    """A prefill node that has the KV, so that only a decode node is placed."""


@dataclass(frozen=True, slots=True)
class ChosenNodes:
    """A placement and its nodes, with nothing leased yet."""

    wanted: PlacementQuery
    placement: Placement
    prefill: Node
    decode: Node


@dataclass(frozen=True, slots=True)
class PlacementLeases:
    """A prompt's leases; without `prefill` its decode node computes it."""

    wanted: PlacementQuery
    placement: Placement
    prefill: Lease | None
    decode: Lease


class Placer:
    def __init__(
        self, config: RouterConfig, pool: Pool, node_health: NodeHealth, rng: random.Random
    ) -> None:
        self._pool, self._node_health, self._rng = pool, node_health, rng
        self._outputs: dict[str, RunningMean] = {}
        self.waiting: Counter[str] = Counter()
        """Requests, by model, that wait for a place after a failed attempt."""
        self.take_over(config)

    def take_over(self, config: RouterConfig) -> None:
        self._policies = {Role.PREFILL: config.prefill_policy, Role.DECODE: config.decode_policy}
        self._spills = not config.strict_roles and set(self._policies.values()) == {PRICE}

    def wanted(
        self, job: Job, prefix: Prefix | None, tokens: int = 0, peer: Node | None = None
    ) -> PlacementQuery:
        """Return the query for a job; `tokens` of prompt and output so far, if a node has told."""
        length, cached = (
            self._pool.prefixes.lookup(prefix) if prefix is not None else (job.prompt_tokens, {})
        )
        tokens = max(1, tokens or length)
        ttft_ms, tpot_ms = default_targets(self._pool.typical_costs(job.model), tokens)
        answers = max(job.choices, job.best_of)
        told = job.targets
        request = PlacementRequest(
            tokens,
            1.0 if job.prompt_only else self.expected_output(job.model) * answers,
            _bounded(told.ttft_s, ttft_ms),
            _bounded(told.tpot_s, tpot_ms),
            job.max_tokens * answers or math.inf,
            tie=crc32(job.id.encode()),
            cached=cached,
            session=job.session,
        )
        return PlacementQuery(job.model, request, prefix, peer)

    def limited(self, wanted: PlacementQuery, targets: Slo) -> PlacementQuery:
        """Return a query that is refused, or waits, where it cannot be served within targets.

        While no node has told its costs, nothing is refused.
        """
        if self._pool.typical_costs(wanted.model) is UNKNOWN:
            return wanted
        ttft_ms, tpot_ms = ((each or math.inf) * 1e3 for each in (targets.ttft_s, targets.tpot_s))
        return replace(
            wanted, request=replace(wanted.request, ttft_limit_ms=ttft_ms, tpot_limit_ms=tpot_ms)
        )

    def expected_output(self, model: str) -> float:
        mean = self._outputs.get(self._pool.base_of(model))
        return FIRST_OUTPUT if mean is None else mean.value

    def answered(
        self, model: str, tokens: int, prefix: Prefix | None = None, prompt_tokens: int = 0
    ) -> None:
        if prefix is not None:
            self._pool.prefixes.counted(prefix, prompt_tokens)
        if tokens and (base := self._pool.base_of(model)):
            mean = self._outputs.setdefault(base, RunningMean(FIRST_OUTPUT, _OUTPUTS_MEAN))
            mean.add(min(tokens, _MOST_OUTPUT))

    def find(
        self,
        wanted: PlacementQuery,
        tried_prefill: Collection[Node] = (),
        tried_decode: Collection[Node] = (),
        *,
        anyway: bool = False,
        spills: bool = True,
        alone: bool = False,
    ) -> ChosenNodes | Wait | Refuse:
        """Choose nodes that have not been tried. Raises NoNode, Overloaded, KvNotLoaded.

        `anyway` ignores the room for KV. Without `spills` a decode node computes the prompt only if
        no prefill node can; with `alone` none is asked.
        """
        now, request = time.monotonic(), wanted.request
        if anyway:  # a part of its answer is there
            request = replace(
                request, ignores_room=True, ttft_limit_ms=math.inf, tpot_limit_ms=math.inf
            )
        decode = self._takers(Role.DECODE, wanted, tried_decode, now)
        able = self._computing(wanted, decode, tried_decode, now, anyway=anyway)
        groups = (
            []
            if alone and wanted.peer is None
            else self._groups(self._sources(wanted, tried_prefill, now), decode)
        )
        if not groups:
            if not able:
                return self._nowhere(wanted, tried_prefill, now)
            groups = [([], able)]
        avoids = self._node_health.avoids(now)
        if wanted.peer is not None:
            states = [node.state for node in self._by_policy(Role.DECODE, wanted, groups[0][1])]
            placed = place_decode(request, states, wanted.peer.url, avoids)
            return placed if isinstance(placed, Wait) else self._found(wanted, placed)
        computes = None if len(able) == len(decode) else {node.url for node in able}.__contains__
        ways, others = list[Placement](), list[Wait | Refuse]()
        for sources, targets in groups:
            cluster = Cluster(
                [node.state for node in self._by_policy(Role.PREFILL, wanted, sources)],
                [node.state for node in self._by_policy(Role.DECODE, wanted, targets)],
                avoids,
                self._spills and spills,
                computes,
            )
            way = place(request, cluster)
            if isinstance(way, Placement):
                ways.append(way)
            else:
                others.append(way)
        if ways:
            return self._found(wanted, min(ways, key=lambda way: way.price))
        return next((other for other in others if isinstance(other, Wait)), others[0])

    def take(self, found: ChosenNodes) -> PlacementLeases:
        """Lease what a placement takes, until `give_back`."""
        wanted, request, source, target = (
            found.wanted,
            found.wanted.request,
            found.prefill,
            found.decode,
        )
        share, row = shares_of(request, found.placement, source.state, target.state)
        prefill = None
        if share is not None and wanted.peer is None:
            prefill = self._pool.hold(source, share, request.tokens, wanted.prefix, request.cached)
        computes = request.tokens if share is None else 0
        decode = self._pool.hold(target, row, computes, wanted.prefix, request.cached)
        return PlacementLeases(wanted, found.placement, prefill, decode)

    def hold_alone(
        self,
        role: Role,
        wanted: PlacementQuery,
        tried: Collection[Node],
        kind: NodeKind,
        tokens: int,
    ) -> Lease:
        """Lease one vLLM node for a request that computes `tokens`. Raises NoNode."""
        nodes = self._pool.up(role, tried, wanted.model, kind)
        if not nodes:
            raise self._pool.no_node(role, wanted.model)
        states = [node.state for node in self._by_policy(role, wanted, nodes)]
        request = replace(wanted.request, ignores_room=True)
        if role is Role.PREFILL:
            name = place_prefill(request, states).name
        else:
            placed = place_decode(request, states, "")
            assert isinstance(placed, Placement)
            name = placed.decode
        node = self._named(name)
        share = Share(
            prompt_ms=node.state.prompt_ms(tokens, request.cached.get(name, 0)) if tokens else 0.0
        )
        if role is Role.DECODE:
            share.context, share.output = request.tokens + request.output / 2, request.output
        return self._pool.hold(node, share, tokens, wanted.prefix, request.cached)

    def give_back(self, placed: PlacementLeases) -> None:
        for lease in (placed.prefill, placed.decode):
            if lease is not None:
                self._pool.give_back(lease)

    def _named(self, name: str) -> Node:
        node = self._pool.find(name)
        assert node is not None
        return node

    def _found(self, wanted: PlacementQuery, placed: Placement) -> ChosenNodes:
        # A node that nobody names any more may still have its KV.
        return ChosenNodes(
            wanted, placed, wanted.peer or self._named(placed.prefill), self._named(placed.decode)
        )

    def _takers(
        self,
        role: Role,
        wanted: PlacementQuery,
        tried: Collection[Node],
        now: float,
        *,
        computes: bool = False,
    ) -> list[Node]:
        return self._node_health.available(role, wanted.model, tried, now, computes=computes)

    def _sources(self, wanted: PlacementQuery, tried: Collection[Node], now: float) -> list[Node]:
        if wanted.peer is not None:
            return [wanted.peer]
        try:
            return self._takers(Role.PREFILL, wanted, tried, now)
        except NoNode:
            return []

    def _computing(
        self,
        wanted: PlacementQuery,
        decode: Sequence[Node],
        tried: Collection[Node],
        now: float,
        *,
        anyway: bool,
    ) -> Sequence[Node]:
        try:
            sound = self._takers(Role.DECODE, wanted, tried, now, computes=True)
        except (NoNode, Overloaded):
            return decode if anyway else []
        return [node for node in sound if anyway or node.computes_prompts]

    def _groups(
        self, prefill: Sequence[Node], decode: Sequence[Node]
    ) -> list[tuple[Sequence[Node], Sequence[Node]]]:
        if not self._pool.kv_mixed:
            return [(prefill, decode)] if prefill and decode else []
        kinds = [tuple(dict.fromkeys(node.kv for node in nodes)) for nodes in (prefill, decode)]
        return [
            (
                [node for node in prefill if node.kv in sources],
                [node for node in decode if node.kv in targets],
            )
            for sources, targets in _divided(*kinds)
        ]

    def _nowhere(self, wanted: PlacementQuery, tried: Collection[Node], now: float) -> Wait:
        peer = wanted.peer
        prefill = [peer] if peer is not None else self._takers(Role.PREFILL, wanted, tried, now)
        decode = self._pool.up(Role.DECODE, model=wanted.model, kind=NodeKind.KVRELAY)
        if peer is None and self._groups(prefill, decode):
            return Wait("no decode node that could take its KV takes legs now")
        unlikes = (kv_mismatch(source.kv, target.kv) for source in prefill for target in decode)
        raise KvNotLoaded.because("Incompatible", next(filter(None, unlikes), ""))

    def _by_policy(
        self, role: Role, wanted: PlacementQuery, nodes: Sequence[Node]
    ) -> Sequence[Node]:
        name = self._policies[role]
        if name == PRICE or len(nodes) < 2:
            return nodes
        states = [node.state for node in nodes]
        fit = set(fitting(wanted.request, states, decodes=role is Role.DECODE))
        roomy = [node for node in nodes if node.state in fit]
        return [POLICIES[name](wanted.request, roomy or nodes, self._rng)]


def _bounded(told_s: float | None, expected_ms: float) -> float:
    if told_s is None:
        return expected_ms
    return min(max(told_s * 1e3, _LEAST_TARGET * expected_ms), _MOST_TARGET * expected_ms)


@functools.lru_cache(64)
def _divided(
    sources: tuple[KvFacts | None, ...], targets: tuple[KvFacts | None, ...]
) -> list[tuple[frozenset[KvFacts | None], frozenset[KvFacts | None]]]:
    parts: dict[frozenset[KvFacts | None], list[KvFacts | None]] = {}
    for kv in sources:
        able = frozenset(each for each in targets if kv_mismatch(kv, each) is None)
        if able:
            parts.setdefault(able, []).append(kv)
    return [(frozenset(alike), able) for able, alike in parts.items()]
