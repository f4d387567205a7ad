"""From requests that were counted and nodes as they are to what the balance is told of each role. Pure.

Work is reckoned at the speeds that are measured, or that a rate card says: of a prompt the time that it takes alone, of
an answer its tokens at the largest batch whose steps keep the target. Prompts that a decode node computes count as a
prefill node's work: with one more of these it would have been. Times are milliseconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planning.balance import Seen, enough, token_ms
from router.balance.work import Work
from router.nodes.node import Node
from wire.config import Role

__all__ = ["Aims", "Typical"]

_HALF_LIFE_S = 20.0
_FADING = ("guessed_tokens", "uncached_tokens", "prefill_ms", "answered", "output_tokens", "context_tokens")
_MOST_RUNNING = 256
"""Nodes do not say how many requests they run at once: no more than this are reckoned with."""


@dataclass(frozen=True, slots=True)
class Aims:
    """What is promised to all."""

    ttft_ms: float
    tpot_ms: float


class Typical:
    """Of one model's requests, what they are like, from those that have ended of late."""

    def __init__(self) -> None:
        self._of = Work()
        self._answered = 0
        self._known = False

    def look(self, work: Work, passed_s: float, nodes: dict[Role, Sequence[Node]], aims: Aims) -> dict[Role, Seen]:
        """What to tell of each role. `nodes`: those that take legs; `work` came within `passed_s`."""
        self._fade(work, 0.5 ** (passed_s / _HALF_LIFE_S))
        self._answered += work.answered
        self._known = self._known or enough(self._answered, work.running)
        prefill, decode = nodes[Role.PREFILL], nodes[Role.DECODE]
        per_token, per_uncached = self._prefill_ms_each(work, prefill)
        waits = per_uncached * (sum(node.tokens for node in prefill) + work.waiting_tokens)
        # What a node computes within a moment is no backlog.
        waits = max(0.0, waits - len(prefill) * aims.ttft_ms / 2)
        each = self._answer_ms(decode, aims.tpot_ms)
        waiting = sum(node.load.waiting for node in decode) + work.waiting
        per_s = 1 / 1e3 / passed_s
        of_prefill, of_decode = work.asked_tokens * per_token * per_s, work.asked * each * per_s
        waiting_s, known = waiting * each / 1e3, self._known
        return {
            Role.PREFILL: Seen(len(prefill), of_prefill, waits / 1e3, work.first, work.first_met),
            Role.DECODE: Seen(len(decode), of_decode, waiting_s, work.last, work.last_met, known=known),
        }

    def _fade(self, work: Work, kept: float) -> None:
        was, self._of = self._of, Work()
        for name in _FADING:
            setattr(self._of, name, getattr(was, name) * kept + getattr(work, name))

    def _prefill_ms_each(self, work: Work, nodes: Sequence[Node]) -> tuple[float, float]:
        """For a token that was asked, by the router's guess and cached or not, and for one that is to be computed."""
        of = self._of
        if of.guessed_tokens:
            return of.prefill_ms / of.guessed_tokens, of.prefill_ms / of.uncached_tokens
        if not work.asked_tokens or not nodes:
            return 0.0, 0.0
        mean = work.asked_tokens / work.asked  # none has ended yet: as if nothing of them were cached
        each = nodes[0].rates.prefill_ms(mean) / mean
        return each, each

    def _answer_ms(self, nodes: Sequence[Node], tpot_ms: float) -> float:
        """Of a node's time, for all tokens of a typical answer."""
        of = self._of
        if not of.answered or not nodes:
            return 0.0
        node = nodes[0]
        room = max(each.load.total_blocks * each.load.block_size for each in nodes)
        most = min(_MOST_RUNNING, int(room / max(1.0, of.context_tokens / of.answered))) if room else _MOST_RUNNING
        rates = node.rates if node.rates.fleet is None else node.rates.fleet
        return of.output_tokens / of.answered * token_ms(rates.step_ms, most, tpot_ms)
