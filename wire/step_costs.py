"""The measured cost of an engine's steps, and room for prompts in a step. Pure.

A step's time is a sum: a fixed part, one for each decoding request by its context, and one for each
prompt token by the tokens before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

__all__ = [
    "MEMORY_MS",
    "TARGET_USED",
    "TPOT_STEPS",
    "DecayingMean",
    "Pace",
    "Point",
    "RunningMean",
    "StepBudget",
    "StepCosts",
    "StepRoom",
    "fitted_costs",
]

MEMORY_MS = 4_000.0
"""Means of nodes and routers are over about so long."""
TARGET_USED = 0.95
"""Share of a wanted time that is planned: what is measured of a node is not exact."""


class DecayingMean:
    """An exponential mean of what comes per millisecond.

    `now` is in milliseconds; an older one counts as the newest.
    """

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value, self._at = 0.0, -math.inf

    def at(self, now: float) -> float:
        return (
            self._value * math.exp((self._at - now) / MEMORY_MS) if now > self._at else self._value
        )

    def add(self, amount: float, now: float) -> None:
        """Count what has come; a negative amount takes back."""
        self._value, self._at = max(0.0, self.at(now) + amount / MEMORY_MS), max(now, self._at)


class RunningMean:
    """A mean of all values while they are few, then of about the newest `memory`.

    `first` counts as one value.
    """

    __slots__ = ("_memory", "_seen", "value")

    def __init__(self, first: float, memory: int) -> None:
        self.value, self._memory, self._seen = first, memory, 1

    def add(self, value: float) -> None:
        self._seen = min(self._seen + 1, self._memory)
        self.value += (value - self.value) / self._seen


TPOT_STEPS = 3.6
"""Users who name no time per token expect so many empty steps: 15 ms of an 8B model on an H200."""
_LEAST_STEP_MS = 0.1
_TTFT_TPOTS, _TTFT_PROMPTS = 24 / TPOT_STEPS, 0.6
_ENOUGH = 9
"""Prompts that take so many times the rest of a step are enough: the rest is a tenth then."""


Point = tuple[int, int, int, int, float]
"""Decoding requests, their context, prompt tokens, tokens before them, milliseconds."""


class StepCosts(msgspec.Struct, frozen=True):
    """A node's own card: milliseconds of a step by what it holds."""

    step: float
    """Any step: launch and reading the weights."""
    row: float
    """Each decoding request."""
    row_context: float
    """Each token of their context."""
    prompts: float
    """A step with prompts, once; negative where it hides reading."""
    prompt_token: float
    prompt_context: float
    """Each prompt token, for each token before it."""

    @property
    def is_sane(self) -> bool:
        return all(
            math.isfinite(getattr(self, name)) and (getattr(self, name) >= 0 or name == "prompts")
            for name in self.__struct_fields__
        )

    @property
    def usual_tpot_ms(self) -> float:
        """Return the time per token that users of such a node expect."""
        return TPOT_STEPS * max(_LEAST_STEP_MS, self.step or self.decode_ms(1, 0))

    def usual_ttft_ms(self, tokens: float) -> float:
        """Return the TTFT that users of such a node expect.

        On an H200 with a model of 8 billion parameters: 100 ms + 0.015 ms per token of the prompt.
        Steeper ones let long prompts wait too long, and short ones spill too early.
        """
        return _TTFT_TPOTS * self.usual_tpot_ms + _TTFT_PROMPTS * self.chunk_ms(tokens)

    def decode_ms(self, rows: float, context: float) -> float:
        """Return the time of a step of decoding requests with this context together."""
        return self.step + self.row * rows + self.row_context * context

    def chunk_ms(self, tokens: float, start: float = 0.0) -> float:
        """Return what a prompt's tokens from `start` on add to a step with prompts."""
        return self.prompt_token * tokens + self.prompt_context * tokens * (start + tokens / 2)

    def prompt_ms(self, tokens: float, start: float = 0.0) -> float:
        """Return the time of a prompt alone, from `start` on."""
        return self.step + max(0.0, self.prompts + self.chunk_ms(tokens, start))

    def prompts_ms(self, tokens: float, pairs: float) -> float:
        """Return what prompts of so many tokens add to a step.

        `pairs` is the sum of `tokens * (start + tokens / 2)`.
        """
        ms = self.prompts + self.prompt_token * tokens + self.prompt_context * pairs
        return max(0.0, ms) if tokens else 0.0

    def tokens_within(self, ms: float, start: float = 0.0) -> int:
        """Return how many prompt tokens from `start` on add at most `ms`."""
        if ms <= 0:
            return 0
        linear, square = self.prompt_token + self.prompt_context * start, self.prompt_context / 2
        divisor = linear + math.sqrt(
            linear * linear + 4 * square * ms
        )  # exact however small `square` is
        return int(2 * ms / divisor) if divisor else 1 << 30

    def step_ms(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Return the time of a step of chunks (tokens, tokens before them); one token decodes."""
        rows = context = prompts = 0
        prompts_ms = self.prompts
        for tokens, start in chunks:
            if tokens == 1:
                rows, context = rows + 1, context + start
            else:
                prompts, prompts_ms = prompts + 1, prompts_ms + self.chunk_ms(tokens, start)
        return self.decode_ms(rows, context) + (max(0.0, prompts_ms) if prompts else 0.0)

    def scaled(self, factor: float) -> StepCosts:
        return StepCosts(**{name: getattr(self, name) * factor for name in self.__struct_fields__})


_MOST_MOVED, _MOST_OFF = 1.03, 16.0
_PROMPTS, _PROMPT_CONTEXT = map(StepCosts.__struct_fields__.index, ("prompts", "prompt_context"))


def fitted_costs(points: Sequence[Point]) -> StepCosts:
    """Return the costs with the least squared relative errors; only that of prompts may be
    negative. `prompt_context` is 0 unless a prompt behind other tokens was measured.
    """
    import numpy as np  # late, because routers do without

    if not points:
        return StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    times = np.array([ms for *_, ms in points])
    terms = np.array(
        [
            (1, rows, context, bool(tokens), tokens, tokens * (start + tokens / 2))
            for rows, context, tokens, start, _ in points
        ],
        dtype=float,
    )
    scales = np.maximum(
        terms.max(axis=0), 1.0
    )  # so that no column decides by its unit alone what is left out
    weighted = terms / scales / times[:, None]
    kept = list(range(terms.shape[1]))
    if not any(start for _, _, _, start, _ in points):
        # One slow step would pass for a cost that grows with the square of the length.
        del kept[_PROMPT_CONTEXT]
    while True:
        found = np.linalg.lstsq(weighted[:, kept], np.ones(len(points)), rcond=None)[0]
        bounded = np.where(np.array(kept) == _PROMPTS, 0.0, found)
        if bounded.min() >= 0:
            break
        del kept[int(bounded.argmin())]
    costs = np.zeros(terms.shape[1])
    costs[kept] = found / scales[kept]
    return StepCosts(*costs.tolist())


class Pace:
    """A factor by which steps take longer than the card says.

    One step moves it by 3 % at most, so that a pause changes little.
    """

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def saw(self, took_ms: float, expected_ms: float) -> None:
        if expected_ms > 0:
            off = min(max(took_ms / expected_ms / self.factor, 1 / _MOST_MOVED), _MOST_MOVED)
            self.factor = min(max(self.factor * off, 1 / _MOST_OFF), _MOST_OFF)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """A limit of prompts in a step: `tokens`, and `gap_ms` beside decodes."""

    tokens: int
    block_size: int
    costs: StepCosts | None = None
    """Without costs, tokens are the only limit."""
    gap_ms: float = math.inf
    shapes: tuple[int, ...] = ()
    """Ascending rows to which the device pads a step with prompts."""
    pace: float = 0.0
    """Factor of the costs; 0: not measured."""

    def room(self, rows: int, context: int) -> StepRoom:
        """Open a step beside decoding requests with this context together."""
        if self.costs is None:
            return StepRoom(self, math.inf, math.inf)
        fixed = self.costs.decode_ms(rows, context) + self.costs.prompts
        return StepRoom(
            self,
            TARGET_USED * self.gap_ms - fixed if rows else math.inf,
            _ENOUGH * max(0.0, fixed),
            rows,
        )


@dataclass(slots=True)
class StepRoom:
    """A step's room for prompts."""

    budget: StepBudget
    ms: float
    """Until the gap."""
    enough_ms: float
    """Until further prompts gain little."""
    rows: int = 0
    """Those of decodes."""
    taken: int = 0

    @property
    def is_open(self) -> bool:
        left = self.budget.tokens - self.taken
        if self.budget.costs is None:
            return self.taken < -(-self.budget.tokens // 2)
        return left > 0 and (not self.taken or self._most(0) > 0)

    def padded(self, tokens: int) -> int:
        """Return how many prompt tokens the device computes for so many."""
        shapes, rows = self.budget.shapes, self.rows
        at = bisect_left(shapes, rows + tokens)
        return shapes[at] - rows if at < len(shapes) and tokens else tokens

    def _most(self, start: int) -> int:
        """Return how many more tokens of a prompt from `start` on the step has time for.

        Rows that pad it are computed anyway; tokens beyond them need time up to the next shape.
        """
        edge, costs = self.padded(self.taken), self.budget.costs
        assert costs is not None
        if self.taken and self.enough_ms <= 0:
            return edge - self.taken
        if self.ms == math.inf:
            return self.budget.tokens
        return max(edge, self._cut(edge + costs.tokens_within(self.ms, start))) - self.taken

    def _cut(self, tokens: int) -> int:
        """Return the largest shape up to these tokens; these, if all are larger or smaller."""
        shapes, rows = self.budget.shapes, self.rows
        at = bisect_right(shapes, rows + tokens)
        fits = at > 0 and shapes[at - 1] > rows and rows + tokens <= shapes[-1]
        return shapes[at - 1] - rows if fits else tokens

    def take(self, wanted: int, start: int) -> int:
        """Take up to `wanted` tokens of a prompt from `start` on, and return how many.

        The first prompt gets a block's tokens in any case, or it would starve.
        """
        budget, costs = self.budget, self.budget.costs
        count = min(wanted, budget.tokens - self.taken)
        if costs is not None:
            most = max(self._most(start), 1 if self.taken else budget.block_size)
            if count > most:
                count, self.enough_ms = most, 0.0
            more = self.padded(self.taken + count) - self.padded(self.taken)
            self.ms -= costs.prompt_token * more + costs.prompt_context * count * (
                start + count / 2
            )
            self.enough_ms -= costs.chunk_ms(count, start)
        self.taken += count
        return count
