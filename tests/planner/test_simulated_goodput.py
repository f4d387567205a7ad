"""What counts of a simulated run, and how long it must be."""

from __future__ import annotations

import pytest

from kvrelay.load.workloads import Asked
from kvrelay.planner.goodput import requests_needed, served
from kvrelay.planner.setting import Result, Setting, Stream, Targets

TARGETS = Targets(1_000.0, 100.0)


def answered(at_s: float, *, in_time: bool) -> Stream:
    stream = Stream(at_s * 1e3, 100, 201, done=201)
    stream.first = stream.at + 900.0
    stream.last = stream.first + 200 * (100.0 if in_time else 200.0)
    return stream


@pytest.mark.parametrize(("late_from_s", "kept"), [(22.0, 0.0), (50.0, 0.5), (79.0, 1.0)])
def test_what_comes_before_the_first_long_answer_has_ended_does_not_count(
    late_from_s: float, kept: float
) -> None:
    streams = [answered(at / 10, in_time=at / 10 < late_from_s) for at in range(1_001)]
    assert served(Result(Setting(), streams), TARGETS, 10.0).attained == pytest.approx(
        kept, abs=0.02
    )


def test_a_run_is_as_long_as_several_long_answers() -> None:
    short, long = ([Asked(0.0, 100, output)] * 9 for output in (20, 5_000))
    assert requests_needed(short, TARGETS, 100.0) == 2_000
    assert requests_needed(short, TARGETS, 1_000_000.0) > 4_000
    assert requests_needed(short, TARGETS, 0.01) == 400
    assert requests_needed(long, TARGETS, 10.0) == 10 * 5 * 501
