"""Steps with dummy contexts: what is computed in them, and that nothing is left of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GPU_SIZES, ON_GPU, make
from invariants import check_scheduler
from tiny_models import make_tiny

from kvrelay.paged_engine.timed_steps import STEPS, TimedSteps


def opened(folder: Path, **options: Any) -> tuple[TimedSteps, list[list[tuple[int, int]]]]:
    """Also (start, count) of each chunk of each step that is launched from now on."""
    engine = make(folder, **options)
    launched: list[list[tuple[int, int]]] = []
    launch = engine._runner.launch

    def noted(chunks: Any) -> Any:
        launched.append([(chunk.start, chunk.count) for chunk in chunks])
        return launch(chunks)

    engine._runner.launch = noted  # type: ignore[method-assign]
    return TimedSteps(engine), launched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny("Qwen3ForCausalLM", path)
    return path


def nothing_left(timed: TimedSteps) -> bool:
    engine = timed.engine
    check_scheduler(engine.scheduler)
    return not engine.has_work and engine.scheduler.pool.free == engine.scheduler.pool.total


def test_decodes_have_their_contexts_without_computing_them(folder: Path) -> None:
    timed, launched = opened(folder)
    times = timed.times(8, 200, seconds=60.0)
    assert len(times) == STEPS - 6
    assert all(ms > 0 for ms in times)
    assert all(len(chunks) == 8 and {count for _, count in chunks} == {1} for chunks in launched)
    starts = [start for chunks in launched for start, _ in chunks]
    assert min(starts) == 200 - STEPS // 2
    assert max(starts) < 200 + STEPS // 2
    assert nothing_left(timed)


def test_a_prefill_step_computes_its_tokens_behind_a_context_alone(folder: Path) -> None:
    timed, launched = opened(folder)
    assert 3 <= len(timed.times(0, 0, 64, 128, seconds=0.0)) <= 12
    assert {tuple(chunks) for chunks in launched} == {((128, 64),)}
    launched.clear()
    assert len(timed.times(0, 0, 100, most=5, seconds=60.0)) == 5
    assert {tuple(chunks) for chunks in launched} == {((0, 100),)}
    assert nothing_left(timed)


def test_a_mixed_step_has_all_decodes_and_a_whole_chunk(folder: Path) -> None:
    timed, launched = opened(folder)
    assert len(timed.times(4, 64, 48, most=5, seconds=60.0)) == 5
    mixed = [chunks for chunks in launched if (0, 48) in chunks]
    assert len(mixed) >= 5
    assert all(sorted(count for _, count in chunks) == [1, 1, 1, 1, 48] for chunks in mixed)
    assert nothing_left(timed)


@pytest.mark.parametrize(("step_s", "runs"), [(0.01, 11), (0.1, 3), (5.0, 1)])
def test_the_slower_a_step_the_fewer_runs(folder: Path, step_s: float, runs: int) -> None:
    ticks = itertools.count(step=step_s)
    timed, launched = opened(folder)
    timed = TimedSteps(timed.engine, clock=lambda: next(ticks))
    assert len(timed.times(1, 32, seconds=0.105)) == runs
    assert len(timed.times(0, 0, 16, seconds=0.105)) == runs
    assert len(launched) <= 2 * runs + 6
    assert nothing_left(timed)


def test_what_does_not_fit_is_refused_and_leaves_nothing(folder: Path) -> None:
    timed, launched = opened(folder, max_num_batched_tokens=64)
    for refused in (
        (64, 450),
        (1, 512),
        (0, 0, 64, 500),
        (0, 0, 65),
        (65, 32),
        (8, 32, 65),
        (60, 450, 4),
    ):
        with pytest.raises(ValueError, match="fit"):
            timed.times(*refused)
        assert nothing_left(timed)
    assert max(sum(count for _, count in chunks) for chunks in launched) == 64


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}])
def test_on_a_gpu_steps_are_launched_ahead_and_decodes_are_graphs(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    if options and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a newer GPU")
    make_tiny("Qwen3ForCausalLM", tmp_path, **GPU_SIZES)
    timed, launched = opened(tmp_path, **ON_GPU, **options)
    assert timed.engine._runner.runs_ahead
    times = timed.times(8, 200, seconds=60.0)
    assert len(times) == STEPS - 6
    assert all(len(chunks) == 8 and {count for _, count in chunks} == {1} for chunks in launched)
    launched.clear()
    assert len(timed.times(0, 0, 128, 256, most=6, seconds=60.0)) >= 3
    assert {tuple(chunks) for chunks in launched} == {((256, 128),)}
    assert nothing_left(timed)
    timed.engine.close()
