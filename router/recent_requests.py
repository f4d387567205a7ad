"""A bounded memory of requests that have ended: the newest, and counts by time slots.

Bounded, whatever comes. Pure: times are seconds of a clock that all processes of the machine share.
No prompt, answer or body is kept. Each request is noted here, so what costs time is done when
somebody looks.
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
    "EndedRequest",
    "RecentRequests",
    "TimeSlot",
    "add",
    "bucket_of",
    "quantile",
    "summed",
]

SLOT_S = 5.0
SLOTS = 60
"""How many slots are kept: five minutes."""
EDGE_SLOTS = 12
"""How many slots of traffic between nodes are shown."""
KEPT_REQUESTS = 200
MAX_EDGES = 1000
"""Pairs of nodes that are counted apart within a slot."""
_BUCKETS_PER_E = 20  # buckets grow by 5 %, so a quantile is off by 2.5 % at most
_SHORTEST_S, _LONGEST_S = 1e-4, 2e3

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


class EndedRequest(msgspec.Struct, frozen=True):
    """A request that has ended. `ended` is a Unix time; unknown figures are None."""

    id: str
    path: str
    model: str
    key: str
    """The name of its API key."""
    status: int
    """499: the client went away. A stream that broke has the status it would have had."""
    error: str
    stream: bool
    local: bool
    """A decode node has computed the prompt."""
    ended: float
    ttft_s: float | None
    inter_token_s: float | None
    """The mean time between tokens."""
    prompt_tokens: int | None
    cached_tokens: int
    output_tokens: int
    prefill: str
    decode: str
    """The addresses of the last nodes; `-` is none."""
    kv_bytes: int
    """Bytes that the decode node has fetched; 0 if none, or if it does not say."""
    stages_s: dict[str, float]
    """Stages as openai_api/stages.py names them."""
    placed: str = "-"
    """Where the request was placed, at what price, and the best other way."""


class Edge(msgspec.Struct):
    """A pair's traffic, from a prefill to a decode node."""

    prefill: str
    decode: str
    handovers: int = 0
    """Hand-overs that began, as in the router's metrics."""
    fetches: int = 0
    """Ended fetches that the decode node has told; the next three fields are theirs."""
    bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    """The part of `transfer_s` that requests have waited for beside their prefill."""

    def add(self, other: Edge) -> None:
        """Add the counts of another edge between the same nodes."""
        self.handovers += other.handovers
        self.fetches += other.fetches
        self.bytes += other.bytes
        self.transfer_s += other.transfer_s
        self.exposed_s += other.exposed_s


class TimeSlot(msgspec.Struct):
    """A slot of SLOT_S: requests that ended, tokens that came, times in buckets."""

    number: int
    ended: int = 0
    failed: int = 0
    """Requests that ended with a 5xx."""
    output_tokens: int = 0
    ttft: dict[int, int] = {}
    inter_token: dict[int, int] = {}
    total: dict[int, int] = {}
    """Times of requests that were answered."""
    edges: dict[tuple[str, str], Edge] = {}
    """By prefill and decode node."""


def summed(slots: Iterable[TimeSlot]) -> TimeSlot:
    """Return one slot with the counts of all."""
    total = TimeSlot(0)
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
    """Return the seconds that this share of all counted is not above; None if none was counted."""
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return round(math.exp(bucket / _BUCKETS_PER_E), 6)
    return None


class RecentRequests:
    """A bounded memory of requests. `now` is a monotonic time."""

    def __init__(self) -> None:
        self.requests: deque[EndedRequest] = deque(maxlen=KEPT_REQUESTS)  # the newest last
        self._slots: deque[TimeSlot] = deque(maxlen=SLOTS)

    def add(self, now: float, request: EndedRequest) -> None:
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

    def add_tokens(self, now: float, tokens: int) -> None:
        """Count tokens of answers."""
        self._slot(now).output_tokens += tokens

    def add_edge(self, now: float, edge: Edge) -> None:
        """Count a hand-over that begins, or a fetch that has ended."""
        edges, pair = self._slot(now).edges, (edge.prefill, edge.decode)
        if pair in edges:
            edges[pair].add(edge)
        elif len(edges) < MAX_EDGES:
            edges[pair] = edge

    def _slot(self, now: float) -> TimeSlot:
        slots, number = self._slots, now // SLOT_S
        if not slots or slots[-1].number != number:
            slots.append(TimeSlot(int(number)))
        return slots[-1]

    def _last(self, count: int, now: float) -> list[TimeSlot]:
        first = int(now // SLOT_S) - count
        return [slot for slot in self._slots if slot.number > first]

    def slots(self, now: float) -> list[TimeSlot]:
        """Return the last SLOTS in which anything happened, the newest last, without edges."""
        return [msgspec.structs.replace(slot, edges={}) for slot in self._last(SLOTS, now)]

    def edges(self, now: float) -> list[Edge]:
        """Return the traffic between nodes within the last EDGE_SLOTS."""
        return list(summed(self._last(EDGE_SLOTS, now)).edges.values())


def _count(buckets: dict[int, int], seconds: float) -> None:
    bucket = bucket_of(seconds)
    buckets[bucket] = buckets.get(bucket, 0) + 1
