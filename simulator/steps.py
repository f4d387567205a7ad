"""Steps of a simulated node: those that it has planned, whose times have a closed form, and the
slowest of the past.

Pure. Milliseconds.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

__all__ = ["Planned", "SlowSteps"]


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
