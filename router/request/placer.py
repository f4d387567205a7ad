"""The placement of requests: what is known of one, which nodes may take it, and its leases."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from zlib import crc32

from kvrelay.router.node_load import UNKNOWN, Share, default_targets
from kvrelay.router.nodes.health import NodeHealth
from kvrelay.router.nodes.node import Lease, Node, NodeKind, Reach, kv_mismatch, kv_reach
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
    shares_of,
)
from kvrelay.router.policies import POLICIES
from kvrelay.router.prefix.index import Prefix
from kvrelay.router.request.job import Job, Slo
from kvrelay.wire.announced import FIRST_OUTPUT
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvNotLoaded, NoNode
from kvrelay.wire.router_config import PRICE, RouterConfig
from kvrelay.wire.step_costs import RunningMean
from kvrelay.wire.transfer import KvFacts

__all__ = ["ChosenNodes", "PlacementLeases", "Placer", "PlacementQuery"]

_OUTPUTS_MEAN = 64
_MOST_OUTPUT = 16_384.0
# Beyond these factors of such nodes' usual targets a target would buy priority.
_LEAST_TARGET, _MOST_TARGET = 0.5, 10.0


_Kind = tuple[KvFacts | None, str]
"""A kind of KV, and the host where that counts."""
_Group = tuple[Sequence[Node], Sequence[Node]]
"""Prefill nodes that all can hand over to all of these decode nodes."""


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    model: str
    request: PlacementRequest
    prefix: Prefix | None
    peer: Node | None
    """A prefill node that has the KV, so that only a decode node is placed."""


@dataclass(frozen=True, slots=True)
class ChosenNodes:
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
        """Return the query for a job; `tokens` so far, if a node has told."""
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
        """Return a query that waits or is refused where it would miss its targets.

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
        available, peer = self._node_health.available, wanted.peer
        decode: Sequence[Node] = available(Role.DECODE, wanted.model, tried_decode, now)
        able = [node for node in decode if anyway or node.computes_prompts]
        sources: Sequence[Node] = () if peer is None else (peer,)
        if peer is None and not alone:
            with suppress(NoNode):
                sources = available(Role.PREFILL, wanted.model, tried_prefill, now)
        groups = self._groups(sources, decode)
        if not groups:
            if not able:
                return self._nowhere(wanted, tried_prefill, now)
            groups = [((), able)]
        avoids = self._node_health.avoids(now)
        if peer is not None:
            targets = [node.state for node in self._by_policy(Role.DECODE, wanted, groups[0][1])]
            placed = place_decode(request, targets, peer.url, avoids)
            return placed if isinstance(placed, Wait) else self._found(wanted, placed)
        computes = None if len(able) == len(decode) else {node.url for node in able}.__contains__
        ways, others = list[Placement](), list[Wait | Refuse]()
        for prefill, takers in groups:
            cluster = Cluster(
                [node.state for node in self._by_policy(Role.PREFILL, wanted, prefill)],
                [node.state for node in self._by_policy(Role.DECODE, wanted, takers)],
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
        wanted, request, source, target = (
            found.wanted,
            found.wanted.request,
            found.prefill,
            found.decode,
        )
        share, row = shares_of(request, found.placement, source.state, target.state)
        prefill = None
        if share is not None and wanted.peer is None:
            prefill = self._pool.hold(source, share, wanted.prefix, request.cached)
        decode = self._pool.hold(target, row, wanted.prefix, request.cached)
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
        request, policy = wanted.request, self._policies[role]
        node = POLICIES["prefix" if policy == PRICE else policy](request, nodes, self._rng)
        cached = request.cached.get(node.url, 0)
        share = Share(prompt_ms=node.state.prompt_ms(tokens, cached) if tokens else 0.0)
        if role is Role.DECODE:
            share.context, share.output = request.tokens + request.output / 2, request.output
        return self._pool.hold(node, share, wanted.prefix, request.cached)

    def give_back(self, placed: PlacementLeases) -> None:
        for lease in (placed.prefill, placed.decode):
            if lease is not None:
                self._pool.give_back(lease)

    def _named(self, name: str) -> Node:
        node = self._pool.find(name)
        assert node is not None
        return node

    def _found(self, wanted: PlacementQuery, placed: Placement) -> ChosenNodes:
        # A node that nobody names may still have its KV.
        return ChosenNodes(
            wanted, placed, wanted.peer or self._named(placed.prefill), self._named(placed.decode)
        )

    def _groups(self, prefill: Sequence[Node], decode: Sequence[Node]) -> list[_Group]:
        if not self._pool.kv_mixed:
            return [(prefill, decode)] if prefill and decode else []
        kinds = itertools.product(*({node.kv_kind for node in each} for each in (prefill, decode)))
        by_host = Reach.ONE_HOST in itertools.starmap(kv_reach, kinds)
        sources, targets = (_by_kind(nodes, by_host=by_host) for nodes in (prefill, decode))
        alike = defaultdict[tuple[_Kind, ...], list[Node]](list)
        for kind, nodes in sources.items():
            if takers := tuple(other for other in targets if _can_hand_over(kind, other)):
                alike[takers] += nodes
        return [
            (nodes, [node for kind in takers for node in targets[kind]])
            for takers, nodes in alike.items()
        ]

    def _nowhere(self, wanted: PlacementQuery, tried: Collection[Node], now: float) -> Wait:
        prefill: Sequence[Node] = (
            self._node_health.available(Role.PREFILL, wanted.model, tried, now)
            if wanted.peer is None
            else (wanted.peer,)
        )
        decode = self._pool.up(Role.DECODE, model=wanted.model, kind=NodeKind.KVRELAY)
        if wanted.peer is None and self._groups(prefill, decode):
            return Wait("no decode node that could take its KV takes legs now")
        unlikes = (kv_mismatch(source.kv, target.kv) for source in prefill for target in decode)
        raise KvNotLoaded.because("Incompatible", next(filter(None, unlikes), ""))

    def _by_policy(
        self, role: Role, wanted: PlacementQuery, nodes: Sequence[Node]
    ) -> Sequence[Node]:
        name = self._policies[role]
        if name == PRICE or len(nodes) < 2:
            return nodes
        fit = set(
            fitting(wanted.request, [node.state for node in nodes], decodes=role is Role.DECODE)
        )
        roomy = [node for node in nodes if node.state in fit]
        return [POLICIES[name](wanted.request, roomy or nodes, self._rng)]


def _by_kind(nodes: Sequence[Node], *, by_host: bool) -> dict[_Kind, list[Node]]:
    found = defaultdict[_Kind, list[Node]](list)
    for node in nodes:
        found[node.kv_kind, node.host if by_host else ""].append(node)
    return found


def _can_hand_over(prefill: _Kind, decode: _Kind) -> bool:
    (kind, host), (other_kind, other_host) = prefill, decode
    reach = kv_reach(kind, other_kind)
    near = not host or not other_host or host == other_host  # an unknown host may be any
    return reach is Reach.ANY or (reach is Reach.ONE_HOST and near)


def _bounded(told_s: float | None, expected_ms: float) -> float:
    if told_s is None:
        return expected_ms
    return min(max(told_s * 1e3, _LEAST_TARGET * expected_ms), _MOST_TARGET * expected_ms)
