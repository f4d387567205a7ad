"""Where a prompt is computed and where its answer is generated: one price for every way, in units of the targets. Pure.

Decodes stay together on decode nodes, because a step has a fixed cost whatever its rows. Prompts go to a prefill node,
or to a decode node where that is cheaper for all: for the request, which waits, and for those whose tokens are delayed.

A decode node with `rate` tokens per millisecond, of which each costs `per_token_ms` of its steps, and with a `share` of
its time given to prompts settles at a time per token of `step / (1 - share - rate * per_token_ms)`. So what it can give
to prompts has a limit that is known in advance, and near that limit each millisecond counts many times.

`place` changes nothing. `Cluster.commit`, `first_token`, `finish` and `cancel` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from wire.step_costs import StepCosts

__all__ = ["Cluster", "NodeState", "Placement", "PlacementRequest", "Refuse", "Wait", "place"]

MEMORY_MS = 4_000.0
"""Rates and shares are means over about so long."""
LOST = 0.5
"""A row that is delayed has on average half of its answer behind it."""
LEAST_LEFT = 0.08
"""A decode node's steps are not thought to stretch further than by this share of its time."""
MOST_LOAD = 0.97
TARGET_USED = 0.9
"""Of the strictest time per token, so much is used: what is measured of a node is not exact."""
LEAST_BUDGET_MS = 250.0
"""A decode node that took no prompt for a while may take as much at once."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement knows of a request. Times are milliseconds."""

    tokens: int
    """Of its prompt."""
    output: float
    """Expected tokens of its answer: a mean of those that ended, and never what it allows."""
    kv_tokens: int
    """Room that it may need on its decode node, at most."""
    ttft_ms: float
    tpot_ms: float
    tie: int = 0
    """A hash of the request: among equals it chooses."""
    cached: Mapping[str, int] = field(default_factory=dict)
    """Tokens of its prompt that nodes have, by their names."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A prefill node and a decode node; the same, if the prompt is computed where the answer is generated."""

    prefill: str
    decode: str
    own_ms: float
    """What the prompt takes there."""
    price: float
    otherwise: float
    """The price of the best other way; infinite if there is none."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No decode node has room for its KV now."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The first token would come too late wherever the prompt is computed."""

    retry_after_ms: float


class Mean:
    """What comes per millisecond, over about MEMORY_MS."""

    __slots__ = ("_at", "_value")

    def __init__(self, value: float = 0.0, at: float = 0.0) -> None:
        self._value, self._at = value, at

    def at(self, now: float) -> float:
        """Return the mean now."""
        return self._value * math.exp((self._at - now) / MEMORY_MS) if now > self._at else self._value

    def add(self, amount: float, now: float) -> None:
        """Count what has come; a negative amount takes back."""
        self._value, self._at = max(0.0, self.at(now) + amount / MEMORY_MS), max(now, self._at)


@dataclass(slots=True)
class NodeState:
    """A node as placement sees it: what it announced, and what was placed on it since. Times are milliseconds."""

    name: str
    costs: StepCosts
    gap_ms: float
    kv_free: int
    backlog_ms: float = 0.0
    """Prompts that are not computed."""
    rows: int = 0
    """Answers that are generated here, or will be."""
    context: float = 0.0
    """Tokens of KV of those."""
    delayed: float = 0.0
    """What a millisecond costs them all: the sum over them of 1 / (time per token * expected tokens)."""
    strictest_ms: float = math.inf
    """The least time per token that one of them wants."""
    budget_ms: float = LEAST_BUDGET_MS
    budget_at: float = 0.0
    share: Mean = field(default_factory=Mean)
    rate: Mean = field(default_factory=Mean)

    @property
    def per_token_ms(self) -> float:
        """What one token of an answer adds to a step."""
        rows = max(1, self.rows)
        return self.costs.row + self.costs.row_context * self.context / rows

    def fits(self, request: PlacementRequest) -> bool:
        """Say whether there is room for its KV."""
        return request.kv_tokens - request.cached.get(self.name, 0) <= self.kv_free

    def own_ms(self, request: PlacementRequest) -> float:
        """Return what the prompt takes here, less what is cached."""
        cached = min(request.cached.get(self.name, 0), request.tokens - 1)
        return max(0.0, self.costs.prompts + self.costs.chunk_ms(request.tokens - cached, cached))

    def budget(self, now: float, own_ms: float, tpot_ms: float) -> float:
        """Return for how many milliseconds of prompts there is room, if the strictest answer wants this much."""
        decoding = self.rate.at(now) * self.per_token_ms
        gained = max(0.0, 1 - decoding - self.costs.step / (TARGET_USED * min(tpot_ms, self.strictest_ms)))
        return min(self.budget_ms + gained * (now - self.budget_at), max(own_ms, LEAST_BUDGET_MS))


def _prefill_price(node: NodeState, request: PlacementRequest, link_ms: float, now: float) -> float:
    """Its own wait, and what it adds to that of those who come behind it."""
    own = node.own_ms(request)
    load = min(MOST_LOAD, node.share.at(now))
    return (node.backlog_ms + node.costs.step + own + link_ms + own * load / (1 - load)) / request.ttft_ms


def _local_price(node: NodeState, request: PlacementRequest, now: float) -> float:
    """Its own wait, stretched by the steps of those who decode, and what it takes from each of them."""
    own = node.own_ms(request)
    if node.budget(now, own, request.tpot_ms) < own:
        return math.inf
    stretch = 1 + (node.costs.decode_ms(node.rows, node.context) / node.gap_ms if node.rows else 0.0)
    left = max(LEAST_LEFT, 1 - node.share.at(now) - node.rate.at(now) * node.per_token_ms)
    wait = (node.backlog_ms + node.costs.step + own) * stretch / request.ttft_ms
    return wait + LOST * own * node.delayed / left


class Cluster:
    """All nodes of one model. `link_ms` is what a hand-over between two nodes takes."""

    def __init__(self, prefill: Iterable[NodeState], decode: Iterable[NodeState], link_ms: float = 2.0) -> None:
        self.prefill = {node.name: node for node in prefill}
        self.decode = {node.name: node for node in decode}
        self.link_ms = link_ms

    def commit(self, request: PlacementRequest, placed: Placement, now: float) -> None:
        """Take what a placement takes."""
        source = self.prefill.get(placed.prefill) or self.decode[placed.prefill]
        target = self.decode[placed.decode]
        source.backlog_ms += placed.own_ms
        source.share.add(placed.own_ms, now)
        if source is target:
            target.budget_ms = target.budget(now, placed.own_ms, request.tpot_ms) - placed.own_ms
            target.budget_at = now
        target.rate.add(request.output, now)
        target.rows += 1
        target.context += request.tokens + request.output / 2
        target.kv_free -= request.kv_tokens
        target.delayed += 1 / (request.tpot_ms * max(1.0, request.output))
        target.strictest_ms = min(target.strictest_ms, request.tpot_ms)

    def first_token(self, placed: Placement) -> None:
        """The prompt is computed."""
        source = self.prefill.get(placed.prefill) or self.decode[placed.prefill]
        source.backlog_ms = max(0.0, source.backlog_ms - placed.own_ms)

    def finish(self, request: PlacementRequest, placed: Placement) -> None:
        """The answer has ended, or its request was cancelled behind its first token."""
        target = self.decode[placed.decode]
        target.rows -= 1
        target.context = max(0.0, target.context - request.tokens - request.output / 2)
        target.kv_free += request.kv_tokens
        target.delayed = max(0.0, target.delayed - 1 / (request.tpot_ms * max(1.0, request.output)))
        if not target.rows:
            target.context, target.delayed, target.strictest_ms = 0.0, 0.0, math.inf

    def cancel(self, request: PlacementRequest, placed: Placement, now: float) -> None:
        """Give back all that a placement took whose prompt was not computed."""
        source = self.prefill.get(placed.prefill) or self.decode[placed.prefill]
        source.share.add(-placed.own_ms, now)
        self.decode[placed.decode].rate.add(-request.output, now)
        if placed.prefill == placed.decode:
            source.budget_ms += placed.own_ms
        self.first_token(placed)
        self.finish(request, placed)


def _tie(request: PlacementRequest, node: NodeState) -> int:
    """Choose among equals by the request, in all routers alike."""
    return crc32(node.name.encode(), request.tie & 0xFFFFFFFF)


def place(request: PlacementRequest, cluster: Cluster, now: float) -> Placement | Wait:
    """Choose the cheapest way of those that have room for the KV."""
    roomy = [node for node in cluster.decode.values() if node.fits(request)]
    if not roomy:
        return Wait()
    least = min(roomy, key=lambda node: (node.rows, _tie(request, node)))
    ways: list[tuple[float, NodeState, NodeState]] = [
        (_prefill_price(node, request, cluster.link_ms, now), node, least) for node in cluster.prefill.values()
    ]
    ways += [(_local_price(node, request, now), node, node) for node in roomy]
    price, source, target = min(ways, key=lambda way: (way[0], _tie(request, way[1])))
    otherwise = min((way[0] for way in ways if way[1] is not source), default=math.inf)
    if math.isinf(price):  # only decode nodes, and all of them at their limit
        source = target = least
    return Placement(source.name, target.name, source.own_ms(request), price, otherwise)
