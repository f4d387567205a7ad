"""The costs that an engine measures of its own steps, and that nothing of the measuring stays."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import drain, make, output, prompt, submit
from tiny_models import make_tiny

from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.step_shapes import step_shapes
from kvrelay.paged_engine.timed_steps import TimedSteps, _points, measure_steps
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.step_costs import Point, StepCosts, fitted_costs

TRUE = StepCosts(3.9, 0.014, 2.4e-5, 0.5, 0.0205, 1.05e-6)
STEPS = [
    (1, 256, 0, 0),
    (32, 32_768, 0, 0),
    (8, 2048, 0, 0),
    (128, 131_072, 0, 0),
    (32, 131_072, 0, 0),
]
STEPS += [(0, 0, 2048, 0), (0, 0, 8192, 0), (0, 0, 512, 0), (0, 0, 128, 0), (0, 0, 2048, 30_000)]


def points() -> list[Point]:
    found = []
    for rows, context, tokens, start in STEPS:
        ms = TRUE.decode_ms(rows, context) + (
            TRUE.prompts + TRUE.chunk_ms(tokens, start) if tokens else 0.0
        )
        found.append((rows, context, tokens, start, ms))
    return found


def test_the_fit_finds_the_sum_that_the_times_are() -> None:
    found = fitted_costs(points())
    for name in StepCosts.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name


def test_few_points_are_better_than_none() -> None:
    assert fitted_costs([]).decode_ms(4, 100) == 0
    assert fitted_costs([(1, 256, 0, 0, 5.0)]).decode_ms(1, 256) == pytest.approx(5)


def test_a_slow_step_is_no_cost_of_long_prompts() -> None:
    few = [(1, 256, 0, 0, 61.0), (0, 0, 64, 0, 187.0), (0, 0, 128, 0, 700.0), (0, 0, 256, 0, 680.0)]
    assert fitted_costs(few).prompt_context == 0
    assert 2_000 < fitted_costs(few).prompt_ms(1_024) < 5_000


def test_no_rows_pad_the_steps_that_a_gpu_measures() -> None:
    scheduler = SimpleNamespace(pool=SimpleNamespace(free=20_000))
    sizes = {"max_num_batched_tokens": 8192, "max_model_len": 131_072, "max_num_seqs": 256}
    engine = SimpleNamespace(scheduler=scheduler, pool=SimpleNamespace(block_size=16), **sizes)
    timed: Any = SimpleNamespace(engine=engine, clock=lambda: 0.0, times=lambda *_, **__: [1.0])
    shapes = {shape.rows for shape in step_shapes(max_num_seqs=256, max_prompt_rows=8192)}
    counts = {rows + tokens for rows, _, tokens, *_ in _points(timed) if tokens}
    assert counts - shapes == {4096}, "which has no graph"


def test_an_engine_that_has_measured_itself_answers_as_one_that_has_not(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    plain, measured = make(tmp_path), make(tmp_path)
    costs = measure_steps(measured, EngineConfig(str(tmp_path), device="cpu", max_gap_ms=30))
    assert costs.decode_ms(8, 2048) > 0
    assert costs.prompt_ms(64) >= costs.prompt_ms(1)
    assert (measured.scheduler.budget.gap_ms, measured.scheduler.budget.costs) == (30, costs)
    assert (measured.counters.steps, measured.scheduler.pool.cached) == (0, 0)
    assert measured.scheduler.pool.free == measured.scheduler.pool.total
    answers = []
    for engine in (plain, measured):
        requests = [
            submit(engine, str(at), prompt(length, seed=at))
            for at, length in enumerate((3, 40, 90, 128))
        ]
        drain(engine)
        answers.append([output(each) for each in requests])
    assert answers[0] == answers[1]


def test_a_step_does_not_cost_more_because_it_waited_for_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    engine = make(tmp_path)
    run = engine.step

    def step(*handover: TimedSteps) -> list[Request]:
        if all(each.params.max_tokens == 1 for each in engine.scheduler.live):
            time.sleep(0.05)  # another process computes while prompts are measured
        return run(*handover)

    monkeypatch.setattr(engine, "step", step)
    costs = measure_steps(engine, EngineConfig(str(tmp_path), device="cpu"))
    assert costs.prompt_ms(32) < 4 * costs.decode_ms(1, 256)


def test_a_card_from_a_busy_moment_is_made_good_by_the_steps_that_follow(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    engine = make(tmp_path)
    costs = engine.costs = StepCosts(10_000.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    submit(engine, "r", prompt(20), max_tokens=400)
    drain(engine)
    kept = engine.scheduler.budget.costs
    assert kept is not None
    assert kept.step < costs.step / 8


def test_a_pool_without_room_leaves_steps_out(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    engine = make(tmp_path, kv_cache_memory_bytes=8 * 16 * 3 * 2 * 2 * 64, max_model_len=64)
    assert measure_steps(engine, EngineConfig(str(tmp_path), device="cpu")).step >= 0
    assert engine.scheduler.budget.gap_ms >= 200
