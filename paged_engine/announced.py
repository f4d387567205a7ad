"""What an engine's load tells of its requests, for a price: sums that are kept as requests come, decode and end. Pure.

`now` is in milliseconds, and costs are those that steps have now: the node's card times its pace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from paged_engine.request import Request
from wire.decaying_mean import MEMORY_MS, DecayingMean
from wire.outputs import Finish
from wire.step_costs import StepCosts

__all__ = ["Announced"]

_FIRST_OUTPUT = 128.0
"""Tokens that an answer is thought to have before any has ended here."""
_NEW_OUTPUT = 1 / 32
_DEFAULT_TPOT_STEPS = 4
_LEAST_TPOT_MS = 0.1
_TPOT_USED = 0.9
"""Of the strictest time per token: what is measured of a node is not exact."""
_FIRST_SPILL_MS, _MOST_SPILL_MS = 250.0, 2_000.0


class Announced:
    """Of one engine. A request *came* when it began to wait for the first time, and *left* when it ended.

    A decode node gains time for prompts that a prefill node could compute as long as its decodes leave some: with
    `token_rate` tokens per millisecond and a share of its time for prompts a token comes every
    `step / (1 - share - token_rate * per_token_ms)` milliseconds.
    """

    def __init__(self) -> None:
        self.token_rate = self.prompt_share = 0.0
        self.row_weight = 0.0
        self.spill_ms = _FIRST_SPILL_MS
        """May be below 0: a prompt was less cached than its router thought."""
        self._output = _FIRST_OUTPUT
        self._tpots: Counter[float] = Counter()
        self._to_begin = self._emitted = 0
        self._tokens, self._prompts = DecayingMean(), DecayingMean()
        self._at = math.inf

    @property
    def strictest_tpot_ms(self) -> float:
        """The least time per token that one of the requests wants which decode here; 0: there are none."""
        return min(self._tpots, default=0.0)

    def came(self, request: Request, costs: StepCosts | None) -> None:
        """Count a request. What it does not say of its answer is what is usual here; one that decodes elsewhere has
        none."""
        if request.hold or request.params.max_tokens < 2:
            request.tpot_ms, request.expected_output = 0.0, 0
            return
        request.tpot_ms = request.tpot_ms or _default_tpot_ms(costs)
        request.expected_output = min(request.expected_output or round(self._output), request.params.max_tokens)
        request.to_begin = request.expected_output
        self._to_begin += request.to_begin
        self._tpots[request.tpot_ms] += 1
        self.row_weight += _weight(request)

    def emitted(self, request: Request) -> None:
        """A token of it is known. From its first decode step on it is measured what the request adds."""
        self._emitted += 1
        if request.to_begin and request.output_tokens > 1:
            self._begun(request)

    def left(self, request: Request) -> None:
        """Take a request out of the sums; its `finish` is known."""
        if not request.tpot_ms:
            return
        if request.finish in (Finish.STOP, Finish.LENGTH):
            self._output = max(1.0, self._output + _NEW_OUTPUT * (request.output_tokens - self._output))
        self._begun(request)
        self._tpots[request.tpot_ms] -= 1
        if not self._tpots[request.tpot_ms]:
            del self._tpots[request.tpot_ms]
        self.row_weight = self.row_weight - _weight(request) if self._tpots else 0.0

    def computes(self, prompts_ms: float, now: float) -> None:
        """Prompts of a step take so long."""
        self._prompts.add(prompts_ms, now)

    def spills(self, ms: float) -> None:
        """A prompt that takes so long was taken though a prefill node could compute it."""
        self.spill_ms -= ms

    def go_on(self, now: float, costs: StepCosts | None, backlog_ms: float, rows: int, context: int) -> None:
        """Bring what changes with time up to date, of an engine with so many rows and their context."""
        self._tokens.add(self._emitted, now)
        self._emitted = 0
        self.token_rate = self._tokens.at(now) + self._to_begin / MEMORY_MS
        self.prompt_share = self._prompts.at(now) + backlog_ms / MEMORY_MS
        passed, self._at = max(0.0, now - self._at), now
        if costs is not None:
            decoding = self.token_rate * (costs.row + costs.row_context * context / max(1, rows))
            tpot_ms = self.strictest_tpot_ms or _default_tpot_ms(costs)
            gained = max(0.0, 1 - decoding - costs.step / (_TPOT_USED * tpot_ms)) * passed
            self.spill_ms = min(self.spill_ms + gained, _MOST_SPILL_MS)

    def check(self, live: Collection[Request]) -> None:
        """Raise AssertionError if a sum is not that of these requests."""
        decoding = [each for each in live if each.tpot_ms]
        assert self._to_begin == sum(each.to_begin for each in decoding)
        assert self._tpots == Counter(each.tpot_ms for each in decoding)
        assert math.isclose(self.row_weight, math.fsum(map(_weight, decoding)), rel_tol=1e-9, abs_tol=1e-12)

    def _begun(self, request: Request) -> None:
        self._to_begin -= request.to_begin
        request.to_begin = 0


def _weight(request: Request) -> float:
    return 1 / (request.tpot_ms * max(1, request.expected_output))


def _default_tpot_ms(costs: StepCosts | None) -> float:
    return max(_LEAST_TPOT_MS, 0.0 if costs is None else _DEFAULT_TPOT_STEPS * costs.step)
