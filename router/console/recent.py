"""What the router remembers of requests that have ended: the newest of them, and counts by slots of
a few seconds.

Bounded, whatever comes. Pure: times are given, in seconds; slots are counted by a clock that all
processes of the machine share. No prompt, answer or body is kept. It is told of every request, so
what costs time is done when somebody looks: that is seldom.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

__all__ = [
    "EDGE_SLOTS",
    "KEPT_REQUESTS",
    "MAX_EDGES",
    "SLOTS",
    "SLOT_S",
    "Edge",
    "Ended",
    "Recent",
    "Slot",
    "add",
    "bucket_of",
    "quantile",
    "summed",
]

SLOT_S = 5.0
SLOTS = 60
"""How many are kept: five minutes."""
EDGE_SLOTS = 12
"""Within these what went between nodes is shown."""
KEPT_REQUESTS = 200
MAX_EDGES = 1000
"""Pairs of nodes that are counted apart within a slot."""

_BUCKETS_PER_E = 20
"""Buckets grow by 5 %, so a quantile is off by 2.5 % at most."""
_SHORTEST_S, _LONGEST_S = 1e-4, 2e3

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


class Ended(msgspec.Struct, frozen=True):
    """One request that has ended. `ended` is a Unix time; a figure that nobody knows is None."""

    id: str
    path: str
    model: str
    key: str
    """The name of its API key."""
    status: int
    """499: the client went away. Of a stream that broke: what it would have been."""
    error: str
    stream: bool
    local: bool
    """A decode node has computed its prompt."""
    ended: float
    ttft_s: float | None
    inter_token_s: float | None
    """The mean between its tokens."""
    prompt_tokens: int | None
    cached_tokens: int
    output_tokens: int
    prefill: str
    decode: str
    """Addresses of the nodes of its last legs; `-` is none."""
    kv_bytes: int
    """That its decode node has fetched; 0 if none, or if that does not say."""
    stages_s: dict[str, float]
    """As openai_api/stages.py names them."""
    placed: str = "-"
    """Where, at what price, and what the best other way would have cost."""


class Edge(msgspec.Struct):
    """What went from a prefill to a decode node."""

    prefill: str
    decode: str
    handovers: int = 0
    """Begun, as the router's metrics count them."""
    fetches: int = 0
    """Ended ones of which the decode node has told; the next three are of these."""
    bytes: int = 0
    """0 if the nodes do not say."""
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    """Of transfer_s, what requests have waited for beside their prefill."""

    def add(self, other: Edge) -> None:
        """Add the counts of another one, of the same nodes."""
        self.handovers += other.handovers
        self.fetches += other.fetches
        self.bytes += other.bytes
        self.transfer_s += other.transfer_s
        self.exposed_s += other.exposed_s


class Slot(msgspec.Struct):
    """What ended within SLOT_S, and the tokens that came. The spreads count by buckets."""

    number: int
    ended: int = 0
    failed: int = 0
    """Of them with a 5xx."""
    output_tokens: int = 0
    ttft: dict[int, int] = {}
    inter_token: dict[int, int] = {}
    total: dict[int, int] = {}
    """Of those that were answered."""
    edges: dict[tuple[str, str], Edge] = {}
    """By prefill and decode node."""


def summed(slots: Iterable[Slot]) -> Slot:
    """Return one slot with the counts of all."""
    total = Slot(0)
    for slot in slots:
        total.ended += slot.ended
        total.failed += slot.failed
        total.output_tokens += slot.output_tokens
        add(total.ttft, slot.ttft)
        add(total.inter_token, slot.inter_token)
        add(total.total, slot.total)
        for pair, edge in slot.edges.items():
            total.edges.setdefault(pair, Edge(*pair)).add(edge)
    return total


def add(sums: dict[_Key, _Number], more: Mapping[_Key, _Number]) -> None:
    """Add counts to sums."""
    for key, count in more.items():
        sums[key] = sums.get(key, 0) + count


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket that counts such a time."""
    return round(math.log(min(max(seconds, _SHORTEST_S), _LONGEST_S)) * _BUCKETS_PER_E)


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the seconds that this share of all counted is not above; None if nothing was counted."""
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return round(math.exp(bucket / _BUCKETS_PER_E), 6)
    return None


class Recent:
    """A bounded memory of requests. `now` is a monotonic time."""

    def __init__(self) -> None:
        self.requests: deque[Ended] = deque(maxlen=KEPT_REQUESTS)
        """The newest last."""
        self._slots: deque[Slot] = deque(maxlen=SLOTS)

    def ended(self, now: float, request: Ended) -> None:
        """Keep and count a request that has ended."""
        self.requests.append(request)
        slot = self._slot(now)
        slot.ended += 1
        if request.ttft_s is not None:
            _count(slot.ttft, request.ttft_s)
            if request.inter_token_s is not None:
                _count(slot.inter_token, request.inter_token_s)
        if request.status < 400:
            _count(slot.total, request.stages_s["total"])
        elif request.status >= 500:
            slot.failed += 1

    def flowed(self, now: float, tokens: int) -> None:
        """Count tokens of answers."""
        self._slot(now).output_tokens += tokens

    def moved(self, now: float, edge: Edge) -> None:
        """Count what goes from one node to another: a hand-over that begins, or a fetch that has
        ended.
        """
        edges, pair = self._slot(now).edges, (edge.prefill, edge.decode)
        if pair in edges:
            edges[pair].add(edge)
        elif len(edges) < MAX_EDGES:
            edges[pair] = edge

    def _slot(self, now: float) -> Slot:
        slots, number = self._slots, now // SLOT_S
        if not slots or slots[-1].number != number:
            slots.append(Slot(int(number)))
        return slots[-1]

    def slots(self, now: float) -> list[Slot]:
        """Return those of the last SLOTS in which anything happened, the newest last, without
        edges.
        """
        first = int(now // SLOT_S) - SLOTS
        return [
            msgspec.structs.replace(slot, edges={}) for slot in self._slots if slot.number > first
        ]

    def edges(self, now: float) -> list[Edge]:
        """Return what went between nodes within the last EDGE_SLOTS."""
        first = int(now // SLOT_S) - EDGE_SLOTS
        return list(summed(slot for slot in self._slots if slot.number > first).edges.values())


def _count(spread: dict[int, int], seconds: float) -> None:
    bucket = bucket_of(seconds)
    spread[bucket] = spread.get(bucket, 0) + 1
