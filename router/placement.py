"""Chooses where a prompt is computed and where its answer is generated, by one price. Pure.

A prompt goes to a prefill node, or to a decode node where that is cheaper for all: for the request,
which waits, and for those whose tokens it delays. Each request's targets make milliseconds of
waiting and of decoding comparable.

A decode node with `r` tokens per ms, of which each costs `b` of its steps, and a share `u` of its
time for prompts settles at a time per token of `step / (1 - u - r * b)`: near that limit
(Load.spill_ms) each millisecond counts many times. All times are milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from zlib import crc32

from kvrelay.router.node_load import NodeLoad, Share

__all__ = [
    "LINK_MS",
    "Cluster",
    "Placement",
    "PlacementRequest",
    "Refuse",
    "Wait",
    "fitting",
    "place",
    "place_decode",
    "shares_of",
]

LINK_MS = 2.0
"""The time of a hand-over between nodes of which nothing is known."""
DEEP_MS = 1_000.0
"""The backlog from which on further requests wait in the router, in order."""
_AVOIDED_MS = 10_000.0
"""The time of a hand-over between two nodes whose last one failed."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    tokens: int
    """Tokens of the prompt, and those generated elsewhere."""
    output: float
    """Expected tokens of the answer: a mean of ended answers, never what is allowed."""
    ttft_ms: float
    tpot_ms: float
    """The targets by which a millisecond of waiting and of decoding is measured."""
    most_output: float = math.inf
    """Most tokens that may be generated; for KV room alone."""
    ttft_limit_ms: float = math.inf
    """The request is refused if its first token would be later."""
    tpot_limit_ms: float = math.inf
    tie: int = 0
    cached: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt that nodes have, by their addresses."""
    session: str = ""
    ignores_room: bool = False

    @property
    def kv_tokens(self) -> float:
        """Return the tokens of KV on the decode node; cached ones are in free blocks."""
        return self.tokens + min(self.output, self.most_output)

    def prompt_ms(self, node: NodeLoad) -> float:
        return node.prompt_ms(self.tokens, self.cached.get(node.name, 0))


@dataclass(frozen=True, slots=True)
class Placement:
    """A prefill node and a decode node; the same if the decode node computes the prompt."""

    prefill: str
    decode: str
    price: float
    other: tuple[str, str] | None
    other_price: float
    spills: bool
    """The prompt is computed on a decode node though a prefill node could."""

    def __str__(self) -> str:
        other = "" if self.other is None else f", {_shown(*self.other)} {self.other_price:.2f}"
        return f"{_shown(self.prefill, self.decode)} price={self.price:.2f}{other}"


def _shown(prefill: str, decode: str) -> str:
    source, target = (name.rpartition("/")[2] for name in (prefill, decode))
    return f"{target} alone" if prefill == decode else f"{source}/{target}"


@dataclass(frozen=True, slots=True)
class Wait:
    """A verdict that no node has room for the KV now, or all are busy enough."""

    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """A verdict that a target would be missed on all nodes."""

    what: Literal["ttft", "tpot"]
    expected_ms: float
    limit_ms: float
    never: bool = False
    """An idle cluster would miss the target, too."""


@dataclass(frozen=True, slots=True)
class Cluster:
    prefill: Sequence[NodeLoad]
    decode: Sequence[NodeLoad]
    avoids: Callable[[str, str], bool] | None = None
    """Tells if the last hand-over between two addresses failed; None: none did."""
    spills: bool = True
    """Decode nodes may compute prompts though a prefill node could."""
    computes: Callable[[str], bool] | None = None
    """Tells if a decode node computes prompts at all; None: all do."""


def fitting(
    request: PlacementRequest, nodes: Sequence[NodeLoad], *, decodes: bool
) -> list[NodeLoad]:
    if request.ignores_room:
        return list(nodes)
    needed = request.kv_tokens if decodes else request.tokens
    return [node for node in nodes if needed <= node.room]


_NO_ROOM = Wait("no decode node has room for its KV")
_Way = tuple[float, float, NodeLoad, NodeLoad]
"""Price, milliseconds to the first token, nodes."""


def place(request: PlacementRequest, cluster: Cluster) -> Placement | Wait | Refuse:
    per_tpot, tokens = 1 / request.tpot_ms, request.tokens
    targets = _targets(request, cluster.decode)
    if not targets:
        return _NO_ROOM
    if request.tpot_limit_ms < math.inf:
        fast = [(price, d) for price, d in targets if price <= request.tpot_limit_ms * per_tpot]
        alone = min(d.idle_ms(tokens)[1] for d in cluster.decode)
        if not fast and alone > request.tpot_limit_ms:
            return Refuse("tpot", alone, request.tpot_limit_ms, never=True)
        targets = fast or [(price, d) for price, d in targets if d.is_idle]
        if not targets:
            return Wait("one more would make tokens take longer than a target")
    sources = fitting(request, cluster.prefill, decodes=False)
    remote = _remote(request, sources, targets, cluster) if sources else None
    # At low load roles are kept: a prefill node that has nothing before it computes the prompt.
    local = (
        None
        if remote is not None and _is_free(remote, cluster)
        else _local(request, targets, cluster)
    )
    ways = sorted(filter(None, (remote, local)), key=lambda way: way[0])
    if not ways:
        return Wait("no prefill node has room for its KV")
    in_time = [way for way in ways if way[1] <= request.ttft_limit_ms]
    if not in_time:
        return _too_late(request, cluster, min(way[1] for way in ways))
    price, _, source, target = in_time[0]
    if source.backlog_ms > max(DEEP_MS, 2 * request.ttft_ms) and not request.ignores_room:
        return Wait("all nodes have enough before them")
    other = next((way for way in ways if way[2] is not source), None)
    return Placement(
        source.name,
        target.name,
        price,
        None if other is None else (other[2].name, other[3].name),
        math.inf if other is None else other[0],
        source is target and bool(cluster.prefill),
    )


def _is_free(remote: _Way, cluster: Cluster) -> bool:
    _, _, source, target = remote
    avoids = cluster.avoids is not None and cluster.avoids(source.name, target.name)
    return not (source.backlog_ms or avoids)


def place_decode(
    request: PlacementRequest,
    nodes: Sequence[NodeLoad],
    peer: str,
    avoids: Callable[[str, str], bool] | None = None,
) -> Placement | Wait:
    """Choose the decode node for a prompt whose KV the prefill node `peer` has or will have."""
    targets = _targets(request, nodes)
    if not targets:
        return _NO_ROOM
    if avoids is not None:
        targets = [each for each in targets if not avoids(peer, each[1].name)] or targets
    price, target = _cheapest(targets, request.tie)
    return Placement(peer, target.name, price, None, math.inf, spills=False)


def _sources(request: PlacementRequest, nodes: Sequence[NodeLoad]) -> list[tuple[float, NodeLoad]]:
    # The shortest prompt is computed first: none that is there counts as longer than this one.
    per_ttft, priced = 1 / request.ttft_ms, []
    for p, own in zip(nodes, _prompts_ms(request, nodes), strict=True):
        before = min(p.backlog_ms, p.prompts * own)
        priced.append(((p.base_ms + before + own * p.behind) * per_ttft, p))
    return priced


def _prompts_ms(request: PlacementRequest, nodes: Sequence[NodeLoad]) -> list[float]:
    tokens, cached, square = request.tokens, request.cached, request.tokens**2
    return [
        n.prompt_ms(tokens, cached[n.name])
        if n.name in cached
        else tokens * n.linear_ms + square * n.square_ms
        for n in nodes
    ]


def _targets(request: PlacementRequest, nodes: Sequence[NodeLoad]) -> list[tuple[float, NodeLoad]]:
    per_tpot, tokens = 1 / request.tpot_ms, request.tokens
    return [
        ((d.row_ms + d.context_ms * tokens) * per_tpot, d)
        for d in fitting(request, nodes, decodes=True)
    ]


def _remote(
    request: PlacementRequest,
    sources: list[NodeLoad],
    targets: list[tuple[float, NodeLoad]],
    cluster: Cluster,
) -> _Way:
    """Return the cheapest pair: its wait, what it adds to others' wait, and decoding."""
    per_ttft, priced = 1 / request.ttft_ms, _sources(request, sources)
    (price, source), (decoding, target) = (
        _cheapest(each, request.tie) for each in (priced, targets)
    )
    link, avoids = LINK_MS, cluster.avoids
    if avoids is not None and avoids(source.name, target.name):
        pairs = [
            (p_price, d_price, p, d)
            for p_price, p in priced
            for d_price, d in targets
            if not avoids(p.name, d.name)
        ]
        if pairs:
            price, decoding, source, target = min(
                pairs, key=lambda each: (each[0] + each[1], each[2].name, each[3].name)
            )
        else:
            link = _AVOIDED_MS
    first = source.wait_ms + request.prompt_ms(source) + link
    return price + decoding + link * per_ttft, first, source, target


def _local(
    request: PlacementRequest, targets: list[tuple[float, NodeLoad]], cluster: Cluster
) -> _Way | None:
    """Return the cheapest node alone, by its stretched wait and what those who decode lose."""
    must = not cluster.prefill
    if not (must or cluster.spills):
        return None
    computes, per_ttft = cluster.computes, 1 / request.ttft_ms
    priced = [
        ((d.wait_ms + own) * d.stretch * per_ttft + own * d.lost + decoding, d)
        for (decoding, d), own in zip(
            targets, _prompts_ms(request, [d for _, d in targets]), strict=True
        )
        if must or own <= d.spill_ms
    ]
    if computes is not None:
        priced = [(price, d) for price, d in priced if computes(d.name)]
    if not priced:
        return None
    price, node = _cheapest(priced, request.tie)
    return price, (node.wait_ms + request.prompt_ms(node)) * node.stretch, node, node


def _cheapest(priced: list[tuple[float, NodeLoad]], tie: int) -> tuple[float, NodeLoad]:
    # The request's hash chooses among equals, the same in all routers.
    least = min([price for price, _ in priced])
    equal = [each for each in priced if each[0] == least]
    return (
        equal[0]
        if len(equal) == 1
        else min(equal, key=lambda each: crc32(each[1].name.encode(), tie))
    )


def _too_late(request: PlacementRequest, cluster: Cluster, expected_ms: float) -> Refuse:
    alone = min(n.idle_ms(1)[0] + request.prompt_ms(n) for n in cluster.prefill or cluster.decode)
    limit = request.ttft_limit_ms
    return Refuse("ttft", alone if alone > limit else expected_ms, limit, never=alone > limit)


def shares_of(
    request: PlacementRequest, placed: Placement, source: NodeLoad, target: NodeLoad
) -> tuple[Share | None, Share]:
    """Return what a placement takes of its prefill node, if any, and of its decode node."""
    own = request.prompt_ms(source)
    output = max(1.0, min(request.output, request.most_output))
    row = Share(
        kv_tokens=request.kv_tokens,
        context=request.tokens + output / 2,
        output=output,
        row_weight=1 / (request.tpot_ms * output),
    )
    if source is target:
        row.prompt_ms, row.spill_ms = own, own if placed.spills else 0.0
        return None, row
    return Share(prompt_ms=own, kv_tokens=request.tokens), row
