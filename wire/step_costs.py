"""The measured cost of an engine's steps, and how many prompt tokens a step may have. Pure.

A step's time is a sum: what any step takes, what each request that decodes adds, by its context,
and what each prompt token adds, by the tokens before it. The scheduler and the simulator reckon
with the same sum.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

__all__ = [
    "MEMORY_MS",
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


class DecayingMean:
    """An exponential mean of what comes per millisecond.

    `now` is in milliseconds. Time never goes back: an older `now` counts as the newest.
    """

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value, self._at = 0.0, -math.inf

    def at(self, now: float) -> float:
        """Return the mean now."""
        return (
            self._value * math.exp((self._at - now) / MEMORY_MS) if now > self._at else self._value
        )

    def add(self, amount: float, now: float) -> None:
        """Count what has come; a negative amount takes back."""
        self._value, self._at = max(0.0, self.at(now) + amount / MEMORY_MS), max(now, self._at)


class RunningMean:
    """A mean of all values while they are few, then of about the newest `memory`.

    `first` counts as one value: what is expected until any was seen.
    """

    __slots__ = ("_memory", "_seen", "value")

    def __init__(self, first: float, memory: int) -> None:
        self.value, self._memory, self._seen = first, memory, 1

    def add(self, value: float) -> None:
        """Count one more value."""
        self._seen = min(self._seen + 1, self._memory)
        self.value += (value - self.value) / self._seen


TPOT_STEPS = 4
"""A time per token of so many empty steps is what users expect who do not say."""
_LEAST_STEP_MS = 0.1
_ENOUGH = 9
"""Prompts that take so many times what the step takes without them: that is a tenth of the step
then.
"""


Point = tuple[int, int, int, int, float]
"""Requests that decode, their context together, prompt tokens, tokens before them, milliseconds."""


class StepCosts(msgspec.Struct, frozen=True):
    """A node's own card: milliseconds of a step by what it holds."""

    step: float
    """Any step: its launch, and reading the weights."""
    row: float
    """Each request that decodes."""
    row_context: float
    """Each token of context of those requests."""
    prompts: float
    """A step with prompts, once; below 0 where computing them hides what any step takes to read."""
    prompt_token: float
    """Each prompt token."""
    prompt_context: float
    """Each prompt token, for each token before it."""

    @property
    def is_sane(self) -> bool:
        """Return whether these can be a node's costs."""
        return all(
            math.isfinite(getattr(self, name)) and (getattr(self, name) >= 0 or name == "prompts")
            for name in self.__struct_fields__
        )

    @property
    def usual_tpot_ms(self) -> float:
        """Return the time per token that users of such a node expect: 15 ms on an H200 with 8
        billion parameters.
        """
        return TPOT_STEPS * max(_LEAST_STEP_MS, self.step or self.decode_ms(1, 0))

    def decode_ms(self, rows: float, context: float) -> float:
        """Return the time of a step of so many requests that decode, with so many tokens of context
        together.
        """
        return self.step + self.row * rows + self.row_context * context

    def chunk_ms(self, tokens: float, start: float = 0.0) -> float:
        """Return what the tokens of one prompt from `start` on add to a step that has prompts."""
        return self.prompt_token * tokens + self.prompt_context * tokens * (start + tokens / 2)

    def prompt_ms(self, tokens: float, start: float = 0.0) -> float:
        """Return the time of a prompt alone, from `start` on, in one step."""
        return self.step + max(0.0, self.prompts + self.chunk_ms(tokens, start))

    def prompts_ms(self, tokens: float, pairs: float) -> float:
        """Return what prompts of so many tokens together add to a step.

        `pairs` is the sum of `tokens * (start + tokens / 2)` over them.
        """
        ms = self.prompts + self.prompt_token * tokens + self.prompt_context * pairs
        return max(0.0, ms) if tokens else 0.0

    def tokens_within(self, ms: float, start: float = 0.0) -> int:
        """Return how many tokens of a prompt from `start` on add no more than `ms` to a step."""
        if ms <= 0:
            return 0
        linear, square = self.prompt_token + self.prompt_context * start, self.prompt_context / 2
        divisor = linear + math.sqrt(
            linear * linear + 4 * square * ms
        )  # exact however small `square` is
        return int(2 * ms / divisor) if divisor else 1 << 30

    def step_ms(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Return the time of a step of these chunks: tokens, and tokens before them. One of one
        token decodes.
        """
        rows = context = prompts = 0
        prompts_ms = self.prompts
        for tokens, start in chunks:
            if tokens == 1:
                rows, context = rows + 1, context + start
            else:
                prompts, prompts_ms = prompts + 1, prompts_ms + self.chunk_ms(tokens, start)
        return self.decode_ms(rows, context) + (max(0.0, prompts_ms) if prompts else 0.0)

    def scaled(self, factor: float) -> StepCosts:
        """Return the card of a node on which everything takes `factor` times as long."""
        return StepCosts(**{name: getattr(self, name) * factor for name in self.__struct_fields__})


_MOST_MOVED, _MOST_OFF = 1.03, 16.0
_PROMPTS = StepCosts.__struct_fields__.index("prompts")


def fitted_costs(points: Sequence[Point]) -> StepCosts:
    """Return the costs with the least sum of squared relative errors; none is below 0, but for that
    of prompts.
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
    """A factor by which steps take longer than a card says, followed step by step.

    Whatever else ran when the card was measured is in it, and whatever runs now is in the steps.
    One step moves the factor by 3 % at most, so that a pause is no news.
    """

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def saw(self, took_ms: float, expected_ms: float) -> None:
        """Learn from a step that was expected to take so long by the card."""
        if expected_ms > 0:
            off = min(max(took_ms / expected_ms / self.factor, 1 / _MOST_MOVED), _MOST_MOVED)
            self.factor = min(max(self.factor * off, 1 / _MOST_OFF), _MOST_OFF)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """A limit of what a step computes of prompts: `tokens`, and `gap_ms` for the whole step where
    somebody decodes.
    """

    tokens: int
    block_size: int
    costs: StepCosts | None = None
    """Without them a step is bounded by its tokens alone."""
    gap_ms: float = math.inf
    shapes: tuple[int, ...] = ()
    """Prompt tokens to which the device pads a step, in order; a longer step is not padded."""
    pace: float = 0.0
    """By which the costs are scaled; 0: they are not measured."""

    def room(self, rows: int, context: int) -> StepRoom:
        """Open a step beside so many requests that decode, with so many tokens of context together."""
        if self.costs is None:
            return StepRoom(self, math.inf, math.inf)
        fixed = self.costs.decode_ms(rows, context) + self.costs.prompts
        return StepRoom(self, self.gap_ms - fixed if rows else math.inf, _ENOUGH * max(0.0, fixed))

    def padded(self, tokens: int) -> int:
        """Return how many prompt tokens the device computes in a step that has so many."""
        at = bisect_left(self.shapes, tokens)
        return self.shapes[at] if at < len(self.shapes) and tokens else tokens

    def within(self, taken: int, ms: float, start: int) -> int:
        """Return how many more tokens a step has in so much time.

        The next ones are of a prompt, from `start` on. Rows that pad the step are computed anyway;
        what goes beyond them is padded again, and so must have the time to the next shape.
        """
        assert self.costs is not None
        edge = self.padded(taken)
        return max(edge, self.cut(edge + self.costs.tokens_within(ms, start))) - taken

    def cut(self, tokens: int) -> int:
        """Return the most tokens up to these that are not padded; these, if all shapes are larger."""
        at = bisect_right(self.shapes, tokens)
        return self.shapes[at - 1] if at > 0 and tokens <= self.shapes[-1] else tokens


@dataclass(slots=True)
class StepRoom:
    """A step's room that is left for prompts."""

    budget: StepBudget
    ms: float
    """Until the gap."""
    enough_ms: float
    """Until what the step takes without prompts is a tenth of it: a further prompt gains little
    then, and all wait.
    """
    taken: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether a further prompt gains by this step."""
        left = self.budget.tokens - self.taken
        if self.budget.costs is None:
            return self.taken < -(-self.budget.tokens // 2)
        return left > 0 and (not self.taken or self._most(0) > 0)

    def _most(self, start: int) -> int:
        if self.taken and self.enough_ms <= 0:
            return self.budget.padded(self.taken) - self.taken
        return (
            self.budget.tokens
            if self.ms == math.inf
            else self.budget.within(self.taken, self.ms, start)
        )

    def take(self, wanted: int, start: int) -> int:
        """Take up to `wanted` tokens of a prompt from `start` on, and return how many.

        The first prompt gets a block's tokens however long the decodes alone take: it would starve
        otherwise.
        """
        budget, costs = self.budget, self.budget.costs
        count = min(wanted, budget.tokens - self.taken)
        if costs is not None:
            most = max(self._most(start), 1 if self.taken else budget.block_size)
            if count > most:
                count, self.enough_ms = most, 0.0
            more = budget.padded(self.taken + count) - budget.padded(self.taken)
            self.ms -= costs.prompt_token * more + costs.prompt_context * count * (
                start + count / 2
            )
            self.enough_ms -= costs.chunk_ms(count, start)
        self.taken += count
        return count
