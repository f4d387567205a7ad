"""What comes per millisecond, over about four seconds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.wire.step_costs import MEMORY_MS, DecayingMean, RunningMean


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5))))
def test_it_is_the_sum_of_all_amounts_by_their_age(came):
    came.sort(key=lambda each: each[1])
    mean = DecayingMean()
    for amount, now in came:
        mean.add(amount, now)
    expected = sum(amount * math.exp((now - 2e5) / MEMORY_MS) for amount, now in came) / MEMORY_MS
    assert mean.at(2e5) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_what_is_taken_back_leaves_nothing_below_none_and_old_news_counts_as_the_newest():
    mean = DecayingMean()
    mean.add(8.0, 100.0)
    mean.add(-4.0, 50.0)
    assert mean.at(0.0) == mean.at(100.0) == 4 / MEMORY_MS
    mean.add(-5.0, 100.0)
    assert mean.at(100.0) == 0


def test_a_running_mean_is_that_of_all_until_they_are_many() -> None:
    mean = RunningMean(128.0, 64)
    for _ in range(3):
        mean.add(64.0)
    assert mean.value == pytest.approx((128 + 3 * 64) / 4)
    for _ in range(1_000):
        mean.add(64.0)
    assert mean.value == pytest.approx(64)
    mean.add(128.0)
    assert mean.value == pytest.approx(65)
