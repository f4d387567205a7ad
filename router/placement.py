"""Chooses where a prompt is computed and where its answer is generated, by one price. Pure.

A prompt goes to a prefill node that is idle or well in time, else to any node where that is
cheapest for all: for the request, which waits, and for those whose tokens it delays. Each request's
targets make milliseconds of waiting and of decoding comparable.

A decode node with `r` tokens per ms, of which each costs `b` of its steps, and a share `u` of its
time for prompts settles at a time per token of `step / (1 - u - r * b)`: near that limit
(Load.spill_ms) each millisecond counts many times. All times are milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from zlib import crc32

from kvrelay.router.node_load import NodeLoad, Share
from kvrelay.wire.step_costs import TARGET_USED

__all__ = [
    "AVOIDED_MS",
    "LINK_MS",
    "Placement",
    "PlacementRequest",
    "Prompt",
    "Refuse",
    "Wait",
    "fitting",
    "near",
    "place",
    "place_decode",
    "shares_of",
]

LINK_MS = 2.0
"""The time of a hand-over between nodes of which nothing is known."""
Link = Callable[[str, str], float]
"""Tells the time of a hand-over between two addresses, at least LINK_MS; infinite: impossible."""
DEEP_MS = 1_000.0
"""The backlog from which on further requests wait in the router, in order."""
WELL_IN_TIME = 0.75
"""The share of the TTFT target within which a prefill node gets the prompt, whatever is cheaper."""
AVOIDED_MS = 10_000.0
"""The time of a hand-over between two nodes whose last one failed."""
Prompt = tuple[float, int, str]
"""The milliseconds of a prompt, its tokens that are not computed, and where the last of them lie:
in the node's pool (empty), its `host` memory, its `store`, or on another node."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    tokens: int
    """Tokens of the prompt, and those of each choice that were generated elsewhere."""
    output: float
    """Expected tokens of all choices: a mean of ended answers, never what is allowed."""
    ttft_ms: float
    tpot_ms: float
    """The targets by which a millisecond of waiting and of decoding is measured."""
    most_output: float = math.inf
    """Most tokens that may be generated; for KV room alone."""
    ttft_limit_ms: float = math.inf
    """The request is refused if its first token would be later."""
    tpot_limit_ms: float = math.inf
    choices: int = 1
    """Each is a row of its decode node, and reads the prompt in each step."""
    tie: int = 0
    cached: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt that nodes have in their pools, by their addresses."""
    below: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens in pool, host memory and files together, of nodes that have more than in the pool."""
    holder: tuple[str, int, Container[str]] = ("", 0, ())
    """The node that leases the most of them to others, how many, and who can take them."""
    session: str = ""
    ignores_room: bool = False

    @property
    def kv_tokens(self) -> float:
        """Return the tokens of KV on the decode node; cached ones are in free blocks."""
        return self.tokens + min(self.output, self.most_output)

    def prompt(self, node: NodeLoad) -> Prompt:
        """Return the quickest way to a prompt's KV on a node."""
        # All of a source or nothing: each further token saves more, and costs the same.
        name, (holder, held, takers) = node.name, self.holder
        cached = self.cached.get(name, 0)
        ways = [(0.0, cached, "")]
        if name in self.below:
            host, files = self.below[name]
            ways.append((node.load.tier_ms(host - cached), host, "host"))
            ways.append((node.load.tier_ms(files - cached, files - host), files, "store"))
        if held > cached and name in takers:
            ways.append((node.load.peer_ms(held - cached), held, holder))
        return min([(ms + node.prompt_ms(self.tokens, had), had, of) for ms, had, of in ways])


@dataclass(frozen=True, slots=True)
class Placement:
    """A prefill node and a decode node; the same if the decode node computes the prompt."""

    prefill: str
    decode: str
    price: float
    other: tuple[str, str, float] | None
    """The best of the other ways, and its price."""
    spills: bool
    """The prompt is computed on a decode node though a prefill node could."""
    prompt: Prompt = (0.0, 0, "")

    def __str__(self) -> str:
        way = f"{_shown(self.prefill, self.decode)} price={self.price:.2f}"
        if source := self.prompt[2]:
            way += f" pulls from {_last(source)}"
        return (
            way if self.other is None else f"{way}, {_shown(*self.other[:2])} {self.other[2]:.2f}"
        )


def _shown(prefill: str, decode: str) -> str:
    target = _last(decode)
    return f"{target} alone" if prefill == decode else f"{_last(prefill)}/{target}"


def _last(name: str) -> str:
    return name.rpartition("/")[2]


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


def near(_prefill: str, _decode: str) -> float:
    return LINK_MS


def fitting(
    request: PlacementRequest, nodes: Sequence[NodeLoad], *, decodes: bool
) -> list[NodeLoad]:
    needed = request.kv_tokens if decodes else request.tokens
    return [node for node in nodes if needed <= node.room or request.ignores_room]


_NO_ROOM = Wait("no decode node has room for its KV")
_Way = tuple[float, float, NodeLoad, NodeLoad, Prompt]
"""Price (infinite: impossible), milliseconds to the first token, nodes, the prompt's way."""


def place(
    request: PlacementRequest,
    prefill: Sequence[NodeLoad],
    decode: Sequence[NodeLoad],
    link: Link = near,
    *,
    spills: bool = True,
) -> Placement | Wait | Refuse:
    """Choose the nodes of a request.

    With `spills` decode nodes may compute prompts though a prefill node could.
    """
    targets = fitting(request, decode, decodes=True)
    if not targets:
        return _NO_ROOM
    decoding, rows = _decoding(request, targets), request.choices
    if request.tpot_limit_ms < math.inf:
        most = TARGET_USED * request.tpot_limit_ms / request.tpot_ms
        fast = [
            d for p, d in zip(decoding, targets, strict=True) if p <= most and d.has_seats(rows)
        ]
        alone = min(d.idle_ms(request.tokens, rows)[1] for d in decode) / TARGET_USED
        if not fast and alone > request.tpot_limit_ms:
            return Refuse("tpot", alone, request.tpot_limit_ms, never=True)
        targets = fast or [d for d in targets if d.is_idle]
        if not targets:
            return Wait("one more would make tokens take longer than a target")
        decoding = _decoding(request, targets)
    sources = fitting(request, prefill, decodes=False)
    ways = [_remote(request, sources, targets, decoding, link)] if sources else []
    linked = ways and link(*_names(ways[0])) <= LINK_MS
    if not (linked and _keeps_roles(request, ways[0], targets)):
        if spills or not prefill:
            ways.append(_local(request, targets, decoding, must=not prefill))
        ways = sorted([way for way in ways if way[0] < math.inf], key=lambda way: way[0])
    if not ways:
        return Wait("no prefill node has room for its KV")
    in_time = [way for way in ways if way[1] <= request.ttft_limit_ms]
    if not in_time:
        return _too_late(request, prefill or decode, min(way[1] for way in ways))
    price, _, source, target, prompt = in_time[0]
    if source.backlog_ms > max(DEEP_MS, 2 * request.ttft_ms) and not request.ignores_room:
        return Wait("all nodes have enough before them")
    others = ((*_names(way), way[0]) for way in ways if way[2] is not source)
    spilled = source is target and bool(prefill)
    return Placement(source.name, target.name, price, next(others, None), spilled, prompt)


def _keeps_roles(request: PlacementRequest, way: _Way, targets: Sequence[NodeLoad]) -> bool:
    """Return whether the prefill node has nothing to do, or will be well in time.

    Otherwise decode nodes would compute prompts to save milliseconds that nobody misses, while
    all of their rows wait: 32 clients that never pause lost a quarter of their throughput.
    """
    _, ttft_ms, source, _, (_, found, _) = way
    if not source.backlog_ms:
        return True
    if ttft_ms > min(WELL_IN_TIME * request.ttft_ms, request.ttft_limit_ms):
        return False
    # The next turn of a chat costs nothing where its last answer was generated.
    return not request.cached or found >= max(request.cached.get(d.name, 0) for d in targets)


def _names(way: _Way) -> tuple[str, str]:
    return way[2].name, way[3].name


def place_decode(
    request: PlacementRequest,
    nodes: Sequence[NodeLoad],
    peer: str,
    link: Link = near,
) -> Placement | Wait:
    """Choose the decode node for a prompt whose KV the prefill node `peer` has or will have."""
    targets = fitting(request, nodes, decodes=True)
    if not targets:
        return _NO_ROOM
    targets = [d for d in targets if link(peer, d.name) <= LINK_MS] or targets
    price, target = _cheapest(_decoding(request, targets), targets, request.tie)
    return Placement(peer, target.name, price, None, spills=False)


def _computing(request: PlacementRequest, nodes: Sequence[NodeLoad]) -> list[float]:
    # The shortest prompt is computed first: none that is there counts as longer than this one.
    per_ttft = 1 / request.ttft_ms
    return [
        (
            p.base_ms
            + (p.backlog_ms if p.backlog_ms < (most := p.prompts * own) else most)
            + own * p.behind
        )
        * per_ttft
        for p, own in zip(nodes, _prompts_ms(request, nodes), strict=True)
    ]


def _prompts_ms(request: PlacementRequest, nodes: Sequence[NodeLoad]) -> list[float]:
    tokens, square = request.tokens, request.tokens**2
    if request.cached or request.below:
        return [request.prompt(n)[0] for n in nodes]
    return [tokens * n.linear_ms + square * n.square_ms for n in nodes]


def _decoding(request: PlacementRequest, nodes: Sequence[NodeLoad]) -> list[float]:
    per_tpot, more = 1 / request.tpot_ms, request.choices - 1
    read = request.tokens * request.choices
    return [(d.row_ms + more * d.next_row_ms + d.context_ms * read) * per_tpot for d in nodes]


def _remote(
    request: PlacementRequest,
    sources: list[NodeLoad],
    targets: list[NodeLoad],
    decoding: list[float],
    link: Link,
) -> _Way:
    """Return the cheapest pair: its wait, what it adds to others' wait, and decoding."""
    per_ttft, computing = 1 / request.ttft_ms, _computing(request, sources)
    p_price, source = _cheapest(computing, sources, request.tie)
    d_price, target = _cheapest(decoding, targets, request.tie)
    link_ms = link(source.name, target.name)
    best = p_price + d_price + link_ms * per_ttft
    if link_ms > LINK_MS:
        order = _order(request.tie)
        priced = sorted(zip(decoding, targets, strict=True), key=order)
        for p_price, p in sorted(zip(computing, sources, strict=True), key=order):
            for d_price, d in priced:
                if p_price + d_price + LINK_MS * per_ttft >= best:
                    break
                ms = link(p.name, d.name)
                if p_price + d_price + ms * per_ttft < best:
                    best, source, target, link_ms = p_price + d_price + ms * per_ttft, p, d, ms
    prompt = request.prompt(source)
    return best, source.wait_ms + prompt[0] + link_ms, source, target, prompt


def _local(
    request: PlacementRequest, targets: list[NodeLoad], decoding: list[float], *, must: bool
) -> _Way:
    """Return the cheapest node alone, by its stretched wait and what those who decode lose."""
    per_ttft = 1 / request.ttft_ms
    prices = [
        (d.wait_ms + own) * d.stretch * per_ttft + own * d.lost + price
        if (must or own <= d.spill_ms) and (d.computes or request.ignores_room)
        else math.inf
        for d, price, own in zip(targets, decoding, _prompts_ms(request, targets), strict=True)
    ]
    price, node = _cheapest(prices, targets, request.tie)
    prompt = request.prompt(node)
    return price, (node.wait_ms + prompt[0]) * node.stretch, node, node, prompt


def _order(tie: int) -> Callable[[tuple[float, NodeLoad]], tuple[float, int]]:
    # The request's hash chooses among equals, the same in all routers.
    return lambda each: (each[0], crc32(each[1].name.encode(), tie))


def _cheapest(prices: list[float], nodes: list[NodeLoad], tie: int) -> tuple[float, NodeLoad]:
    least = min(prices)
    if least == math.inf or prices.count(least) == 1:
        return least, nodes[prices.index(least)]
    return min(zip(prices, nodes, strict=True), key=_order(tie))


def _too_late(request: PlacementRequest, nodes: Sequence[NodeLoad], expected_ms: float) -> Refuse:
    alone = min(n.idle_ms(1)[0] + request.prompt(n)[0] for n in nodes)
    limit = request.ttft_limit_ms
    return Refuse("ttft", alone if alone > limit else expected_ms, limit, never=alone > limit)


def shares_of(
    request: PlacementRequest, placed: Placement, source: NodeLoad, target: NodeLoad
) -> tuple[Share | None, Share]:
    """Return what a placement takes of its prefill node, if any, and of its decode node."""
    own, rows = placed.prompt[0], request.choices
    output = max(1.0, min(request.output, request.most_output))
    row = Share(
        kv_tokens=request.kv_tokens,
        context=rows * request.tokens + output / 2,
        rows=rows,
        output=output,
        row_weight=rows**2 / (request.tpot_ms * output),
    )
    if source is target:
        row.prompt_ms, row.spill_ms = own, own if placed.spills else 0.0
        return None, row
    return Share(prompt_ms=own, kv_tokens=request.tokens), row
