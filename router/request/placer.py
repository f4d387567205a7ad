"""The placement of requests: what is known of one, which nodes may take it, and its leases."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import msgspec

from kvrelay.router.node_load import LEAST_TARGET, UNKNOWN
from kvrelay.router.nodes.node import Lease, Node, NodeKind, kv_mismatch
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.placement import (
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
from kvrelay.router.request.job import Job, Slo, is_undivided
from kvrelay.wire.announced import FIRST_OUTPUT
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvNotLoaded, NoNode
from kvrelay.wire.ladder import Found, places_of
from kvrelay.wire.router_config import PRICE, RouterConfig
from kvrelay.wire.step_costs import TARGET_USED, DecayingMean, RunningMean
from kvrelay.wire.transfer import Source

__all__ = ["PlacementLeases", "Placer", "PlacementQuery"]

_OUTPUTS_MEAN = 64
_MOST_OUTPUT = 16_384.0
# Beyond LEAST_TARGET and this of such nodes' usual targets a target would buy priority.
_MOST_TARGET = 10.0


@dataclass(frozen=True, slots=True)
class PlacementQuery(PlacementRequest):
    """A request to be placed, and which nodes may have it."""

    model: str = ""
    prefix: Prefix | None = None
    peer: Node | None = None
    """A prefill node that has the KV, so that only a decode node is placed."""
    kind: NodeKind = NodeKind.KVRELAY
    alone: bool = False
    """A decode node computes the prompt; no prefill node is asked."""
    spills: bool = True
    """A decode node may also compute the prompt where a prefill node could."""


@dataclass(frozen=True, slots=True)
class PlacementLeases:
    """A prompt's leases; without `prefill` its decode node computes it."""

    wanted: PlacementQuery
    placement: Placement
    prefill: Lease | None
    decode: Lease
    at: float


class Placer:
    def __init__(self, config: RouterConfig, pool: Pool, rng: random.Random) -> None:
        self.config, self._pool, self._rng = config, pool, rng
        self._outputs: dict[str, RunningMean] = {}
        self.waiting: Counter[str] = Counter()
        """Requests, by model, that wait for a place after a failed attempt."""
        self._refused = defaultdict[str, tuple[DecayingMean, DecayingMean]](
            lambda: (DecayingMean(), DecayingMean())
        )

    def wanted(
        self,
        job: Job,
        prefix: Prefix | None,
        tokens: int = 0,
        peer: Node | None = None,
        *,
        alone: bool = False,
    ) -> PlacementQuery:
        """Return the query for a job; `tokens` so far, if a node has told."""
        length, cached, below = (
            (job.prompt_tokens, {}, {}) if prefix is None else self._pool.prefixes.lookup(prefix)
        )
        tokens = max(1, tokens or length)
        costs, told = self._pool.typical_costs(job.model), job.targets
        return PlacementQuery(
            tokens,
            (1.0 if job.prompt_only else self.expected_output(job.model)) * job.choices,
            _bounded(told.ttft_s, costs.usual_ttft_ms(tokens)),
            _bounded(told.tpot_s, costs.usual_tpot_ms),
            job.max_tokens * job.choices or math.inf,
            choices=job.choices,
            tie=crc32(job.id.encode()),
            cached=cached,
            below=below,
            holder=self._holder(cached, below),
            session=job.session_id,
            model=job.model,
            prefix=prefix,
            peer=peer,
            kind=job.kind,
            alone=alone or is_undivided(job),
        )

    def _holder(
        self, cached: dict[str, int], below: dict[str, tuple[int, int]]
    ) -> tuple[str, int, Container[str]]:
        most = cached | {url: host for url, (host, _) in below.items()}
        for url in sorted(most, key=most.__getitem__, reverse=True):
            node = self._pool.find(url)
            if node and (node.up or node.flips_to) and node.kv and node.kv.port:
                return url, most[url], self._pool.takers(url, url in below)
        return "", 0, ()

    def sources(self, placed: PlacementLeases) -> list[Source]:
        """Return where else the node that computes a prompt may take a part of its KV."""
        _, held, url = placed.placement.prompt
        holder, tokens = self._pool.find(url), placed.wanted.cached.get(url, 0)
        if not holder or not (kv := holder.kv):
            return []
        found = [Source(kv.address, kv.port, kv.generation, tokens, kv.seal)] if tokens else []
        if kv.cache is not None and held > tokens:
            found.append(msgspec.structs.replace(kv.cache, tokens=held))
        return found

    def rungs(
        self, placed: PlacementLeases, node: Node, prefix: Prefix, tokens: int, found: Found
    ) -> dict[str, int]:
        """Return a prompt's tokens by rung; `node` computes it, and has told what it found."""
        places = places_of((node.url, placed.placement.prompt[2]))
        nodes = places if found.asked else places[:1]
        them = places_of(each.url for each in self._pool.nodes if each.model == node.model)
        names, size = prefix.keys or (), prefix.block_size or 1
        ladder = self._pool.prefixes.history.ladder
        return ladder(tokens, found, names, size, placed.at, nodes, them)

    def limited(self, wanted: PlacementQuery, targets: Slo) -> PlacementQuery:
        """Return a query that waits or is refused where it would miss its targets.

        While no node has told its costs, nothing is refused.
        """
        if self._pool.typical_costs(wanted.model) is UNKNOWN:
            return wanted
        ttft_ms, tpot_ms = ((each or math.inf) * 1e3 for each in (targets.ttft_s, targets.tpot_s))
        return replace(wanted, ttft_limit_ms=ttft_ms, tpot_limit_ms=tpot_ms)

    def expected_output(self, model: str) -> float:
        mean = self._outputs.get(self._pool.base_of(model))
        return FIRST_OUTPUT if mean is None else mean.value

    def answered(self, model: str, tokens: int) -> None:
        """Learn from a whole answer of so many tokens."""
        if tokens and (base := self._pool.base_of(model)):
            mean = self._outputs.setdefault(base, RunningMean(FIRST_OUTPUT, _OUTPUTS_MEAN))
            mean.add(min(tokens, _MOST_OUTPUT))

    def refused_work(self, now: float) -> dict[str, tuple[float, float]]:
        """Return the refused milliseconds of prompts, and tokens, per millisecond, by model.

        They are means of the last seconds; `now` is in seconds.
        """
        means = self._refused.items()
        return {model: (ms.at(now * 1e3), tokens.at(now * 1e3)) for model, (ms, tokens) in means}

    def note_refused(self, wanted: PlacementQuery, now: float) -> None:
        """Count the work of a request that ends now for want of nodes."""
        if wanted.kind is not NodeKind.KVRELAY:
            return  # nodes of other projects keep their roles
        held = [*wanted.cached.values(), *(files for _, files in wanted.below.values())]
        cached = min(max(held, default=0), wanted.tokens - 1)
        costs = self._pool.typical_costs(wanted.model)
        prompts_ms, tokens = self._refused[self._pool.base_of(wanted.model)]
        prompts_ms.add(costs.chunk_ms(wanted.tokens - cached, cached), now * 1e3)
        tokens.add(min(wanted.output, wanted.most_output), now * 1e3)

    def find_after(self, waited_ms: float, wanted: PlacementQuery) -> Placement | Wait | Refuse:
        """Choose nodes for a request that has waited. Raises as `find`."""
        limit_ms = wanted.ttft_limit_ms
        wanted = replace(wanted, ttft_limit_ms=TARGET_USED * limit_ms - waited_ms)
        found = self.find(wanted)
        if isinstance(found, Wait) and limit_ms < math.inf:
            # Whoever would be late though all nodes had room does not wait for room.
            roomy = self.find(replace(wanted, tpot_limit_ms=math.inf, ignores_room=True))
            found = roomy if isinstance(roomy, Refuse) else found
        if not isinstance(found, Refuse) or found.what != "ttft":
            return found
        never = found.never and found.expected_ms > TARGET_USED * limit_ms
        return Refuse("ttft", (waited_ms + found.expected_ms) / TARGET_USED, limit_ms, never=never)

    def find(
        self,
        wanted: PlacementQuery,
        tried_prefill: Collection[Node] = (),
        tried_decode: Collection[Node] = (),
    ) -> Placement | Wait | Refuse:
        """Choose nodes that have not been tried. Raises NoNode, Overloaded, KvNotLoaded."""
        now, pool, config = time.monotonic(), self._pool, self.config
        peer, model, kind = wanted.peer, wanted.model, wanted.kind
        by_price = config.prefill_policy == config.decode_policy == PRICE
        spills = wanted.spills and by_price and not config.strict_roles
        decode: Sequence[Node] = pool.available(Role.DECODE, model, tried_decode, now, kind)
        able = [node for node in decode if wanted.ignores_room or node.state.computes]

        def link(prefill: str, decode: str) -> float:
            return pool.link_ms(peer or self._named(prefill), self._named(decode), now)

        if peer is not None:
            takers = _takers((peer,), decode) or able
            if not takers:
                raise _incompatible((peer,), decode)
            targets = [node.state for node in self._by_policy(Role.DECODE, wanted, takers)]
            return place_decode(wanted, targets, peer.url, link)
        prefill: Sequence[Node] = ()
        if not wanted.alone:
            try:
                prefill = pool.available(Role.PREFILL, model, tried_prefill, now, kind)
            except NoNode:
                if not able:
                    raise
        elif not able:
            return Wait("no decode node computes prompts")
        chosen = [
            self._by_policy(role, wanted, nodes)
            for role, nodes in ((Role.PREFILL, prefill), (Role.DECODE, decode if prefill else able))
        ]
        # Where those that policies choose cannot hand over, all are asked; then decode nodes alone.
        for sources, nodes in (chosen, (prefill, decode), ((), able)):
            loads = [node.state for node in sources], [node.state for node in nodes]
            found = place(wanted, *loads, link, spills=spills)
            if not isinstance(found, Wait) or not sources or _takers(sources, nodes):
                break
        if not (sources or able):
            up = pool.up(Role.DECODE, model=model, kind=kind)
            if not _takers(prefill, up):
                raise _incompatible(prefill, up)
        return found

    def take(self, wanted: PlacementQuery, placement: Placement) -> PlacementLeases:
        # A node that nobody names may still have its KV.
        source, target = (
            wanted.peer or self._named(placement.prefill),
            self._named(placement.decode),
        )
        share, row = shares_of(wanted, placement, source.state, target.state)
        hold, prefix = self._pool.hold, wanted.prefix
        prefill = None
        if share is not None and wanted.peer is None:
            prefill = hold(source, share, prefix)
        decode = hold(target, row, prefix)
        return PlacementLeases(wanted, placement, prefill, decode, time.monotonic())

    def give_back(self, placed: PlacementLeases) -> None:
        for lease in filter(None, (placed.prefill, placed.decode)):
            self._pool.give_back(lease)

    def _named(self, name: str) -> Node:
        node = self._pool.find(name)
        assert node is not None
        return node

    def _by_policy(
        self, role: Role, wanted: PlacementQuery, nodes: Sequence[Node]
    ) -> Sequence[Node]:
        name: str = getattr(self.config, f"{role}_policy")
        if name == PRICE or len(nodes) < 2:
            return nodes
        fit = set(fitting(wanted, [node.state for node in nodes], decodes=role is Role.DECODE))
        roomy = [node for node in nodes if node.state in fit]
        return [POLICIES[name](wanted, roomy or nodes, self._rng)]


def _takers(prefill: Sequence[Node], decode: Sequence[Node]) -> list[Node]:
    """Return the decode nodes that can take KV of some of these prefill nodes."""
    return [d for d in decode if any(kv_mismatch(p.kv, d.kv) is None for p in prefill)]


def _incompatible(prefill: Sequence[Node], decode: Sequence[Node]) -> KvNotLoaded:
    unlikes = (kv_mismatch(p.kv, d.kv) for p in prefill for d in decode)
    return KvNotLoaded.because("Incompatible", next(filter(None, unlikes), ""))


def _bounded(told_s: float | None, expected_ms: float) -> float:
    if told_s is None:
        return expected_ms
    return min(max(told_s * 1e3, LEAST_TARGET * expected_ms), _MOST_TARGET * expected_ms)
