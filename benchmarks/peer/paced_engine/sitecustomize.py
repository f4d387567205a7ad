"""Python loads this in all processes of paced servers: an engine's steps take what a card says.

Nothing is computed. A step begins when the one before has ended, and its tokens are drawn at random;
all else is real: scheduling, leases, transfers, HTTP.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.paged_engine.engine import Engine
    from kvrelay.paged_engine.request import Chunk
    from kvrelay.wire.step_costs import StepCosts

_LAUNCH_MS = 0.3
"""The launch of a step of decodes, by its graph; the card has those of prompts."""


class PacedStep:
    """A launched step whose tokens are there at a time."""

    prompt_scores = None

    def __init__(self, requests: Sequence[Any], at: float) -> None:
        self.requests, self._at = requests, at

    @property
    def is_done(self) -> bool:
        return time.monotonic() >= self._at

    def sample(self) -> None: ...

    def wait(self) -> tuple[list[int], list[None]]:
        time.sleep(max(0.0, self._at - time.monotonic()))
        return [random.randrange(3, 1000) for _ in self.requests], [None] * len(self.requests)

    def scores(self) -> tuple[()]:
        return ()


def pace(card_file: Path, scale: float) -> None:
    """Have this process's engine keep to a card, `scale` times as slow."""
    from kvrelay.paged_engine import timed_steps
    from kvrelay.paged_engine.runner import CpuRunner
    from kvrelay.planner.rate_card import read_card

    card, free_at = read_card(card_file), 0.0

    def launch(_: CpuRunner, chunks: Sequence[Chunk]) -> PacedStep:
        nonlocal free_at
        decodes = [chunk for chunk in chunks if chunk.count == 1 and chunk.start]
        context, rows = sum(chunk.start for chunk in decodes), len(decodes)
        prompts = [(c.count, c.start) for c in chunks if c.count > 1 or not c.start]
        if not prompts:
            ms, launch_ms = card.step_ms(rows, context), _LAUNCH_MS
        else:
            launch_ms = card.launch_ms(rows, prompts)
            # Launched long ago: the wait for a launch is made here.
            ahead = rows, context, prompts, float("inf")
            ms = card.mixed_ms(*ahead) if rows else card.chunk_ms(*ahead[2:])
        began = time.monotonic()
        time.sleep(launch_ms * scale / 1e3)
        free_at = max(max(began, free_at) + ms * scale / 1e3, time.monotonic())
        sampled = [chunk.request for chunk in chunks for _ in range(chunk.sampled_rows)]
        return PacedStep(sampled, free_at)

    def measure(engine: Engine, _: object) -> StepCosts:
        engine.costs = costs = card.costs.scaled(scale)
        scheduler = engine.scheduler
        gap_ms = card.max_gap_ms * scale
        scheduler.budget = replace(scheduler.budget, costs=costs, gap_ms=gap_ms, pace=1.0)
        return costs

    CpuRunner.runs_ahead = True
    CpuRunner.launch = launch  # type: ignore[assignment,method-assign]
    timed_steps.measure_steps = measure  # type: ignore[assignment]


def slow_down(scale: float) -> None:
    """Have the placement of this process see times that are `scale` times as long as it knows."""
    from kvrelay.wire import announced, step_costs

    step_costs.MEMORY_MS *= scale
    announced.FIRST_SPILL_MS *= scale
    announced._MOST_SPILL_MS *= scale

    from kvrelay.router import placement  # late: it takes some of them by value

    placement.LINK_MS *= scale
    placement.DEEP_MS *= scale


times = float(os.environ["PACED_SCALE"])
if any("kvrelay.node.engine_process" in word for word in sys.orig_argv):
    slow_down(times)
    pace(Path(os.environ["PACED_BY"]), times)
elif "router" in sys.orig_argv:
    slow_down(times)
