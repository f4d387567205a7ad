"""An engine measures its own steps before it serves: a few of each kind, to which
wire/step_costs.py fits the sum.

Owns which steps are measured. Random KV stands for contexts (paged_engine/timed_steps.py), and the
engine forgets all of it afterwards. Steps of a kind that the pool or the batch has no room for are
left out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import time
from dataclasses import replace

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.timed_steps import PREFILLS_AT_ONCE, TimedSteps
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.step_costs import Point, StepCosts, fitted_costs

__all__ = ["measure_steps"]

log = logging.getLogger("kvrelay.engine")

_LIMIT_S = {"cuda": 3.0, "cpu": 5.0}
_GAP_MS = {"cuda": 50.0, "cpu": 200.0}
_DECODES = ((1, 256), (32, 1024), (8, 256), (128, 1024), (32, 4096))
"""Requests, and the context of each."""
_BESIDE = (32, 1024)
"""Those of a step with a prompt, too."""
_PROMPT_PARTS = (4, 1, 8, 2)
"""Prompts of the largest step's tokens divided by these. Shorter ones take no time of their own on
a GPU: the weights are read meanwhile.
"""
_RUNS = 3
_WARM_UPS = 3
_SHORTEST_S = 0.02


def measure_steps(engine: Engine, config: EngineConfig) -> StepCosts:
    """Measure an engine that serves nobody yet, and have it keep its steps to max_gap_ms from then
    on.
    """
    kind = engine.device.type
    points = _points(engine, _LIMIT_S[kind])
    log.info(
        "measured steps, requests x context + prompt tokens behind others: %s",
        ", ".join(f"{rows} x {context // max(1, rows)} + {tokens} behind {start}: {ms:.2f} ms"
                  for rows, context, tokens, start, ms in points),
    )  # fmt: skip
    costs = fitted_costs(points)
    steps = [ms for rows, _, _, _, ms in points if rows]
    least = 2 * statistics.median(steps) if kind == "cpu" and steps else 0.0
    gap_ms = config.max_gap_ms or max(_GAP_MS[kind], least)
    log.info(
        "a step takes %.2f ms, %.1f us more for each request that decodes and %.4f for each token "
        "of its context; "
        "with prompts %.2f ms more, %.2f us for each token and %.6f for each before it; at most "
        "%.0f ms beside decodes",
        costs.step, costs.row * 1e3, costs.row_context * 1e3,
        costs.prompts, costs.prompt_token * 1e3, costs.prompt_context * 1e3, gap_ms,
    )  # fmt: skip
    engine.begin_anew()
    engine.costs = costs
    budget = engine.scheduler.budget
    engine.scheduler.budget = replace(
        budget, costs=costs, gap_ms=gap_ms, shapes=engine.shapes, pace=1.0
    )
    return costs


def _points(engine: Engine, limit_s: float) -> list[Point]:
    """Measure until `limit_s` has passed."""
    until = time.monotonic() + limit_s
    timed = TimedSteps(engine, fill=engine.device.type == "cuda")
    points: list[Point] = []

    def there_is_time(rows: int, context: int, tokens: int, start: int) -> bool:
        """Judge by the points so far."""
        known = fitted_costs(points)
        ms = known.decode_ms(rows, rows * context) + known.chunk_ms(tokens, start)
        return time.monotonic() + ms * (_RUNS + _WARM_UPS) / 1e3 < until

    longest = min(engine.max_num_batched_tokens, engine.max_model_len - 2)
    part, pool = longest // 4, engine.scheduler.pool.free * engine.pool.block_size
    behind = min(
        4 * longest, engine.max_model_len - 2 - part, pool // (2 * PREFILLS_AT_ONCE) - part
    )
    prompts = [(0, 0, longest // parts, 0) for parts in _PROMPT_PARTS] + [
        (0, 0, part, max(0, behind))
    ]
    decodes = [(rows, context, 0, 0) for rows, context in _DECODES]
    for step in (*itertools.chain(*zip(decodes, prompts, strict=True)), (*_BESIDE, part, 0)):
        rows, context, tokens, start = step
        if rows <= engine.max_num_seqs and rows + tokens and there_is_time(*step):
            with contextlib.suppress(ValueError):  # no room
                points.append(
                    (rows, rows * context, tokens, start, statistics.median(_times(timed, *step)))
                )
    return points


def _times(timed: TimedSteps, rows: int, context: int, tokens: int, start: int) -> list[float]:
    if not rows:
        return timed.prefill(tokens, start, most=_RUNS, seconds=_SHORTEST_S)
    if not tokens:
        return timed.decode(rows, context, steps=_RUNS + _WARM_UPS, seconds=_SHORTEST_S)
    return timed.mixed(rows, context, tokens, most=_RUNS, seconds=_SHORTEST_S)
