"""What the router remembers of requests that have ended: the newest of them, and counts by slots of a few seconds.

Bounded, whatever comes. Pure: times are given, in seconds; slots are counted by a clock that all processes of the
machine share. No prompt, answer or body is kept. It is told of every request, so what costs time is done when somebody
looks: that is seldom.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import msgspec

__all__ = ["KEPT_REQUESTS", "MAX_EDGES", "SLOTS", "SLOT_S", "Edge", "Ended", "Recent", "Slot", "bucket_of", "quantile"]

SLOT_S = 5.0
SLOTS = 60
"""How many are kept: five minutes."""
KEPT_REQUESTS = 200
MAX_EDGES = 1000
"""Pairs of nodes that are counted apart within a slot."""

_log = math.log
# Buckets grow by 5 %, so a quantile is off by 2.5 % at most.
_SMALLEST_S = 1e-4
_LOG_GROWTH = math.log(1.05)
_BUCKETS_PER_E = 1 / _LOG_GROWTH
_FIRST = math.log(_SMALLEST_S) * _BUCKETS_PER_E
_MOST = 340  # 1,600 s


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
    """KV that went from one node to another."""

    handovers: int = 0
    """Begun, as the router's metrics count them."""
    fetches: int = 0
    """Ended ones of which the decode node has told."""
    bytes: int = 0
    """0 if the nodes do not say."""
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    """Of transfer_s, what requests have waited for beside their prefill."""

    def add(self, other: Edge) -> None:
        """And these."""
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


def bucket_of(seconds: float) -> int:
    """The number of its bucket."""
    if seconds <= _SMALLEST_S:
        return 0
    bucket = int(_log(seconds) * _BUCKETS_PER_E - _FIRST)
    return bucket if bucket < _MOST else _MOST


def quantile(counts: Iterable[dict[int, int]], shares: tuple[float, ...]) -> list[float] | None:
    """Seconds that these shares of all counted are not above; None if nothing was counted."""
    buckets: dict[int, int] = {}
    for each in counts:
        for bucket, count in each.items():
            buckets[bucket] = buckets.get(bucket, 0) + count
    total = sum(buckets.values())
    if not total:
        return None
    found: list[float] = []
    below, ordered, at = 0, sorted(buckets), -1
    for share in shares:
        while below < share * total or at < 0:
            at += 1
            below += buckets[ordered[at]]
        found.append(_SMALLEST_S * math.exp((ordered[at] + 0.5) * _LOG_GROWTH))
    return found


class Recent:
    """See the module. `now` is a monotonic time."""

    def __init__(self) -> None:
        self._requests: deque[Ended] = deque(maxlen=KEPT_REQUESTS)
        self._slots: deque[Slot] = deque(maxlen=SLOTS)

        self.keep = self._requests.append
        """A request that has ended."""

    def ended(
        self,
        now: float,
        status: int,
        ttft_s: float | None,
        inter_token_s: float | None,
        total_s: float,
    ) -> None:
        """Count a request that has ended."""
        slot = self._slot(now)
        slot.ended += 1
        if ttft_s is not None:
            counts, bucket = slot.ttft, bucket_of(ttft_s)
            counts[bucket] = counts.get(bucket, 0) + 1
            if inter_token_s is not None:
                counts, bucket = slot.inter_token, bucket_of(inter_token_s)
                counts[bucket] = counts.get(bucket, 0) + 1
        if status < 400:
            counts, bucket = slot.total, bucket_of(total_s)
            counts[bucket] = counts.get(bucket, 0) + 1
        elif status >= 500:
            slot.failed += 1

    def flowed(self, now: float, tokens: int) -> None:
        """Count tokens of answers."""
        self._slot(now).output_tokens += tokens

    def handed_over(self, now: float, prefill: str, decode: str) -> None:
        """Count a request whose KV one node begins to have from another."""
        self._add(now, prefill, decode, Edge(1))

    def fetched(self, now: float, prefill: str, decode: str, size: int, transfer_s: float, exposed_s: float) -> None:
        """A decode node has told how it fetched the KV of a request that has ended."""
        self._add(now, prefill, decode, Edge(0, 1, size, transfer_s, exposed_s))

    def _add(self, now: float, prefill: str, decode: str, edge: Edge) -> None:
        edges, pair = self._slot(now).edges, (prefill, decode)
        known = edges.get(pair)
        if known is not None:
            known.add(edge)
        elif len(edges) < MAX_EDGES:
            edges[pair] = edge

    def _slot(self, now: float) -> Slot:
        slots, number = self._slots, now // SLOT_S
        if not slots or slots[-1].number != number:
            slots.append(Slot(int(number)))
        return slots[-1]

    def requests(self, since: float) -> list[Ended]:
        """Those that have ended after this Unix time, the newest last."""
        return [each for each in self._requests if each.ended > since]

    def slots(self, now: float) -> list[Slot]:
        """Those of the last SLOTS in which anything happened, the newest last."""
        first = int(now // SLOT_S) - SLOTS
        return [slot for slot in self._slots if slot.number > first]
