"""Whether the cluster has room for one more request, what its targets would come to, and when there will be room. Pure.

Prefill is a backlog of tokens that drains by measured rates; decode is room for KV and the time of a step. Times are
seconds, counts are tokens. What is not measured refuses nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.admission.fair_queue import Ahead, Entrant
from router.nodes.spare_time import SPARE, Rates, Streaming, stalled_ms

__all__ = [
    "Freed",
    "Nodes",
    "Promised",
    "SureRates",
    "View",
    "own_tpot_s",
    "own_ttft_s",
    "prefill_speed",
    "ttft_s",
    "until_decode_s",
    "until_prefill_s",
]

# A prefill node is busy enough with this much work in so many requests: it never runs dry, and can choose among them.
_ENOUGH_S = 1.0
_ENOUGH_REQUESTS = 8
# So many for each decode node may begin before there is room for their KV: when there is, they are computed already.
_AHEAD_REQUESTS = 2
# Of the target of time per token a full batch may take: one request too many is late for all that run there. (Simulated
# 1P1D of chat on H200s, 88 requests/s: 88 % in time instead of 63; at 104: 66 instead of 44; at 80: 100 and 100.)
_FULL = 0.97
_SAMPLE_TOKENS = 2048  # of a queue, to ask how fast it moves
_HALF_LIFE_S = 30.0


class SureRates(Rates, Protocol):
    """With those by which a request may be refused: of sizes that were measured."""

    def queue_ms(self, tokens: float, requests: int) -> float:
        """Until so many tokens of so many requests are computed that are ahead in the queue."""
        ...

    def sure_prefill_ms(self, tokens: float) -> float:
        """To compute so many tokens of a prompt, or the most that were measured."""
        ...

    def sure_step_ms(self, running: float) -> float:
        """One decode step with so many running requests, or the most that were measured."""
        ...


class View(Streaming, Protocol):
    """One node, and its room for KV. What is there for certain may be less than what it is chosen by."""

    @property
    def rates(self) -> SureRates: ...
    @property
    def url(self) -> str: ...
    @property
    def certain_requests(self) -> int: ...
    @property
    def certain_tokens(self) -> int: ...
    @property
    def kv_room(self) -> float: ...
    @property
    def computes_prompts(self) -> bool: ...


class Nodes(msgspec.Struct, frozen=True):
    """Those that could take the request. `conditional`: decode nodes compute prompts that would be late otherwise."""

    prefill: Sequence[View]
    decode: Sequence[View]
    conditional: bool = False


@dataclass(slots=True)
class Promised:
    """What has begun and no node counts yet, over all nodes."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    kv_tokens: int = 0


class Freed:
    """How fast decode ends requests, and with them frees KV: sums whose past fades by half every 30 s."""

    __slots__ = ("_at", "_requests", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._at: float | None = None
        self._requests = self._tokens = self._seconds = 0.0

    def ended(self, tokens: int, now: float) -> None:
        """A request has ended, which held so many tokens."""
        if self._at is not None:
            passed = max(0.0, now - self._at)
            fade = 0.5 ** (passed / _HALF_LIFE_S)
            self._seconds = self._seconds * fade + passed
            self._requests = self._requests * fade + 1
            self._tokens = self._tokens * fade + tokens
        self._at = now

    @property
    def requests_s(self) -> float:
        """Requests per second; 0 is not known yet."""
        return self._requests / self._seconds if self._seconds else 0.0

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0 is not known yet."""
        return self._tokens / self._seconds if self._seconds else 0.0


def prefill_speed(nodes: Sequence[View]) -> float:
    """Tokens per second that all of these compute together when each has work; infinite if that takes no time."""
    speed = 0.0
    for node in nodes:
        took = node.rates.prompts_ms(_SAMPLE_TOKENS)
        if took <= 0:
            return math.inf
        speed += _SAMPLE_TOKENS / took * 1e3
    return speed


def _waits_s(node: View, more_requests: float, more_tokens: float) -> float:
    """Until a prefill node wants more work; 0 if it does now."""
    requests = node.certain_requests + more_requests
    if requests < _ENOUGH_REQUESTS:
        return 0.0
    return max(0.0, node.rates.queue_ms(node.certain_tokens + more_tokens, math.ceil(requests)) / 1e3 - _ENOUGH_S)


def until_prefill_s(nodes: Nodes, promised: Promised) -> float:
    """Until a prefill node wants more work, if nothing else begins; 0 if one does now."""
    share = 1 / max(1, len(nodes.prefill))
    requests, tokens = promised.prefill_requests * share, promised.prefill_tokens * share
    soonest = math.inf
    for node in nodes.prefill:
        soonest = min(soonest, _waits_s(node, requests, tokens))
        if soonest == 0:
            break
    return soonest if nodes.prefill else 0.0


def until_decode_s(entrant: Entrant, nodes: Nodes, promised: Promised, freed: Freed, ahead: Ahead) -> float:
    """Until a decode node has room for it, by KV and by its target, behind what waits ahead; 0 if one has now.

    Infinite if there is no room and nothing has ended yet by which to say when there will be.
    """
    share = 1 / max(1, len(nodes.decode))
    needed = entrant.tokens + (promised.kv_tokens + ahead.tokens) * share
    may_lack = (promised.decode_requests + ahead.requests) * share < _AHEAD_REQUESTS
    lacking, to_end = math.inf, math.inf
    for node in nodes.decode:
        idle = not (node.certain_requests or promised.decode_requests)
        lacks = 0.0 if may_lack or idle else max(0.0, needed - node.kv_room)
        lacking = min(lacking, lacks)
        if entrant.tpot_s is None:
            to_end = 0.0
        elif not lacks:
            to_end = min(to_end, _to_end(node, (promised.decode_requests + ahead.requests) * share, entrant.tpot_s))
        if not lacks and not to_end:
            return 0.0
    if not nodes.decode:
        return 0.0
    if lacking:
        return lacking / (freed.tokens_s * share) if freed.tokens_s else math.inf
    return to_end / (freed.requests_s * share) if freed.requests_s else math.inf


def _to_end(node: View, more_requests: float, tpot_s: float) -> float:
    """How many requests must end on a decode node before one more keeps its target there."""
    running, most_ms = node.certain_requests + math.ceil(more_requests), _FULL * tpot_s * 1e3
    if node.rates.sure_step_ms(running + 1) <= most_ms:
        return 0
    low, high = 0, running  # the most that may run beside it
    while low < high:
        middle = (low + high + 1) // 2
        fits = node.rates.sure_step_ms(middle + 1) <= most_ms
        low, high = (middle, high) if fits else (low, middle - 1)
    return running - low


def own_ttft_s(entrant: Entrant, nodes: Nodes) -> float:
    """Its first token on an idle cluster, as far as was measured."""
    return min((node.rates.sure_prefill_ms(entrant.uncached) for node in nodes.prefill), default=0.0) / 1e3


def own_tpot_s(nodes: Nodes) -> float:
    """Its further tokens on an idle cluster, as far as was measured."""
    return min((node.rates.sure_step_ms(1) for node in nodes.decode), default=0.0) / 1e3


def ttft_s(entrant: Entrant, nodes: Nodes, promised: Promised, ahead: Ahead, decode_s: float) -> float:
    """When its first token would be there, from now on: behind the prompts on the nodes and those that wait ahead, and
    not before there is room on a decode node, in `decode_s`."""
    known = decode_s if decode_s < math.inf else 0.0
    if not nodes.prefill:
        return known
    coming = promised.prefill_tokens / len(nodes.prefill)
    queue_ms = min(
        node.rates.queue_ms(node.certain_tokens, node.certain_requests) + node.rates.prompts_ms(coming)
        for node in nodes.prefill
    )
    waits = ahead.uncached / prefill_speed(nodes.prefill) if ahead.uncached else 0.0
    expected = max(queue_ms / 1e3 + waits, known) + own_ttft_s(entrant, nodes)
    if entrant.ttft_s is None or entrant.tpot_s is None or expected <= entrant.ttft_s or not nodes.conditional:
        return expected
    helped = (
        stalled_ms(node, entrant.uncached, entrant.tpot_s * 1e3) for node in nodes.decode if node.computes_prompts
    )
    soonest = min(helped, default=math.inf) / 1e3
    # Only so soon it is computed there (router/walk/conditional.py).
    return min(expected, known + soonest) if soonest < SPARE * entrant.ttft_s else expected
