"""Sums over a node's requests, for a price. Pure.

Tokens and prompts count when announced; an answer counts with its expected tokens until it ends.
`now` is in milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter

from kvrelay.wire.step_costs import TARGET_USED, DecayingMean, RunningMean, StepCosts

__all__ = ["FIRST_OUTPUT", "FIRST_SPILL_MS", "Announced"]

FIRST_OUTPUT = 128.0
"""Expected tokens of an answer before any has ended."""
_OUTPUTS_MEAN = 32
_LEAST_TPOT_MS = 0.1
FIRST_SPILL_MS = 250.0
"""Time for prompts that may spill at once."""
_MOST_SPILL_MS = 2_000.0


class Announced:
    """A set of an engine's sums. A decoding request *came* when it first waited, and *left* at its
    end.

    A decode node gains time for others' prompts while its decodes leave some: with `token_rate`
    tokens per millisecond and a share for prompts, a token takes `step / (1 - share - token_rate *
    per_token_ms)` milliseconds.
    """

    def __init__(self) -> None:
        self.token_rate = self.prompt_share = 0.0
        self.row_weight = 0.0
        self.spill_ms = FIRST_SPILL_MS
        """May be below 0: a prompt was less cached than its router thought."""
        self._output = RunningMean(FIRST_OUTPUT, _OUTPUTS_MEAN)
        self._tpots: Counter[float] = Counter()
        self._tokens, self._prompts = DecayingMean(), DecayingMean()
        self._new_tokens = self._new_prompts_ms = 0.0
        """Tokens and prompts since the means were brought up to date."""
        self._at = math.inf

    @property
    def strictest_tpot_ms(self) -> float:
        """Return the least time per token that a request wants; 0: none."""
        return min(self._tpots, default=0.0)

    def came(
        self, tpot_ms: float, expected: int, most: int, costs: StepCosts | None
    ) -> tuple[float, int]:
        """Count a request, and return its time per token and expected tokens; 0 stands for the
        usual.
        """
        tpot_ms = tpot_ms or _usual_tpot_ms(costs)
        expected = min(expected or round(self._output.value), most)
        self._new_tokens += expected
        self._tpots[tpot_ms] += 1
        self.row_weight += _weight(tpot_ms, expected)
        return tpot_ms, expected

    def left(self, tpot_ms: float, expected: int, tokens: int, *, complete: bool) -> None:
        """Take out what `came` returned, after so many tokens; `complete`: they are the answer."""
        if complete:
            self._output.add(max(1, tokens))
        self._new_tokens += tokens - expected
        self._tpots[tpot_ms] -= 1
        if not self._tpots[tpot_ms]:
            del self._tpots[tpot_ms]
        self.row_weight = self.row_weight - _weight(tpot_ms, expected) if self._tpots else 0.0

    def prompt(self, ms: float, *, spills: bool) -> None:
        """Count a prompt that takes so long; `spills`: a prefill node could compute it."""
        self._new_prompts_ms += ms
        if spills:  # many short ones may come no faster than one that is long is waited for
            self.spill_ms = min(self.spill_ms, max(ms, FIRST_SPILL_MS)) - ms

    def go_on(self, now: float, costs: StepCosts | None, rows: int, context: int) -> None:
        """Bring up to date what changes with time."""
        self._tokens.add(self._new_tokens, now)
        self._prompts.add(self._new_prompts_ms, now)
        self._new_tokens = self._new_prompts_ms = 0.0
        means = self._tokens, self._prompts  # below 0 if what is taken back has partly faded
        self.token_rate, self.prompt_share = (max(0.0, mean.at(now)) for mean in means)
        passed, self._at = max(0.0, now - self._at), now
        if costs is not None:
            decoding = self.token_rate * (costs.row + costs.row_context * context / max(1, rows))
            tpot_ms = self.strictest_tpot_ms or _usual_tpot_ms(costs)
            gained = max(0.0, 1 - decoding - costs.step / (TARGET_USED * tpot_ms)) * passed
            self.spill_ms = min(self.spill_ms + gained, _MOST_SPILL_MS)


def _weight(tpot_ms: float, expected: int) -> float:
    return 1 / (tpot_ms * max(1, expected))


def _usual_tpot_ms(costs: StepCosts | None) -> float:
    return _LEAST_TPOT_MS if costs is None else costs.usual_tpot_ms
