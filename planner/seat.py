"""A leg on a simulated node, and the steps that a node has planned. Values only; milliseconds."""

from __future__ import annotations

import bisect
import enum
import math
from dataclasses import dataclass
from typing import Protocol

from kvrelay.planner.setting import Stream

__all__ = ["Hears", "Leg", "Planned", "Seat", "SlowSteps", "Told"]


class Leg(enum.Enum):
    """What a request wants of a node."""

    PREFILL = "prefill"
    """Its prompt's KV, and a token; the KV is kept until it is released."""
    DECODE = "decode"
    """Its tokens, from KV that is fetched."""
    WHOLE = "whole"
    """Prompt and tokens."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a router tells a decode node of a request: the node announces it to all routers."""

    tpot_ms: float = 0.0
    expected_output: int = 0
    """0: what is usual on the node."""
    spill_tokens: int = 0
    """Tokens of its prompt to compute that a prefill node could."""


class Hears(Protocol):
    """Who is told of what happens on a node. Times in milliseconds."""

    def begins(self, stream: Stream, now: float) -> None:
        """The KV of a prefill leg begins to be computed."""

    def computed(self, stream: Stream, now: float, last_chunk: int) -> None:
        """A prompt is computed, and a token there; so many tokens were in its last chunk."""

    def fetched(self, stream: Stream, now: float) -> None:
        """Nobody needs to keep its KV any more."""

    def ended(self, stream: Stream, now: float) -> None:
        """Its last token is there."""

    def gap(self, ms: float, times: int) -> None:
        """So long between two tokens, so often."""


@dataclass(eq=False, slots=True)
class Seat:
    """A leg here. `ends_at` is the number of the step with its last token."""

    stream: Stream
    leg: Leg
    generated: int
    """Tokens that are there already; of a decode leg, with the one that its prefill node computes."""
    tpot_ms: float = 0.0
    """The time per token that it wants; 0: it does not decode here."""
    expected: int = 0
    """Tokens of its answer."""
    came: float = float("-inf")
    """When it was there for a step to be launched with it, if it is in none yet."""
    turn: tuple[int, int, int] = (0, 0, 0)
    known: int = 0
    """Tokens whose KV is to be computed here."""
    left: int = 0
    """Of these, in no step yet; before it begins, what that will probably be."""
    begun: bool = False
    told: bool = False
    """That its prompt is computed."""
    blocks: tuple[int, ...] = ()
    """Named ones here; one that is computed while another request computes it, too, has no name."""
    private: int = 0
    """Tokens of KV here that are in none of them, when it began to run."""
    missing: int = 0
    computed_at: float = -1.0
    last_chunk: int = 0
    joined_step: int = 0
    ends_at: int = 0
    due: int = 0
    """The number of the step with the last token that is expected of it."""
    stopped: float = -1.0
    longest: float = 0.0
    running: bool = False


@dataclass(slots=True)
class Planned:
    """So many steps from `began` on: the first takes `each`, and every further one `growth` longer."""

    count: int = 0
    began: float = 0.0
    each: float = 0.0
    growth: float = 0.0

    def took(self, steps: int) -> float:
        """So many of them."""
        return steps * self.each + self.growth * steps * (steps - 1) / 2

    @property
    def ends(self) -> float:
        """When the last one has ended."""
        return self.began + self.took(self.count)

    @property
    def last_ms(self) -> float:
        """What the last one takes."""
        return self.took(self.count) - self.took(self.count - 1)

    def done_by(self, now: float) -> int:
        """How many have ended."""
        if self.count <= 1:
            return 0
        passed, growth = now - self.began, self.growth
        linear = self.each - growth / 2
        steps = passed / linear
        if growth * steps > 1e-6 * linear:
            steps = (math.sqrt(linear * linear + 2 * growth * passed) - linear) / growth
        return min(self.count, int(steps + 1e-6))


class SlowSteps:
    """The longest step since any other. Kept are only those that no later one exceeds, so the first
    since a step is the longest since then.
    """

    __slots__ = ("_ms", "_numbers")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._ms: list[float] = []

    def note(self, number: int, ms: float) -> None:
        """The newest step took so long."""
        numbers, longest = self._numbers, self._ms
        while longest and longest[-1] <= ms:
            numbers.pop()
            longest.pop()
        numbers.append(number)
        longest.append(ms)

    def since(self, number: int) -> float:
        """The longest one behind this one; 0 if there was none."""
        at = bisect.bisect_right(self._numbers, number)
        return self._ms[at] if at < len(self._ms) else 0.0

    def clear(self) -> None:
        """Nobody asks for what was until now."""
        self._numbers.clear()
        self._ms.clear()
