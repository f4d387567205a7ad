"""Splits of GPUs by queueing theory: known answers, and what must hold of any."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.load.workloads import Asked
from kvrelay.planner.estimate import (
    Demand,
    Estimate,
    Goal,
    Split,
    demand_of,
    estimate,
    plans,
    splits,
)
from kvrelay.planner.rate_card import DecodePoint, PrefillPoint, RateCard, TransferPoint
from kvrelay.wire.errors import ConfigError

# A prompt takes 0.02 ms a token, a step of n requests 5 ms and 0.05 each, whatever their context.
CARD = RateCard(
    "m", "h", "0", "", kv_tokens=1_000_000, block_size=16, max_num_seqs=256, step_tokens=8_192,
    prefill=[PrefillPoint(1, 0, 0.02), PrefillPoint(8_192, 0, 163.84)],
    decode=[DecodePoint(requests, at, 5 + 0.05 * requests) for requests in (1, 256) for at in (0, 99_999)],
    transfer={"direct": [TransferPoint(1, 1.0), TransferPoint(8_192, 1.0)]},
)  # fmt: skip
TWO = msgspec.structs.replace(CARD, tensor_parallel_size=2)


def alike(prompt: int, output: int, cached: int = 0) -> Demand:
    return Demand([(prompt, cached, output)])


def test_a_prefill_node_with_equal_prompts_waits_as_m_d_1_does() -> None:
    """Half busy with 20 ms each, 25/s: the mean wait of M/D/1 is 10 ms, half of all wait."""
    found = estimate(Split(1, 9, CARD, CARD), alike(1_000, 10), Goal(20.31, 1_000), 25.0)
    assert found.prefill_use == pytest.approx(0.5)
    assert found.ttft_kept == pytest.approx(0.5, abs=0.01)
    later = estimate(Split(1, 9, CARD, CARD), alike(1_000, 10), Goal(20.3 + 20, 1_000), 25.0)
    assert later.ttft_kept == pytest.approx(1 - 0.5 * 2.718 ** -(20 * 0.5 / 10), abs=0.01)


def test_a_decode_node_holds_what_little_says() -> None:
    """100 tokens each of 5 + 0.05 n ms at 10/s: n = 10 * 0.1 * (5 + 0.05 n), so n = 5.263."""
    found = estimate(Split(9, 1, CARD, CARD), alike(10, 100), Goal(1_000, 10), 10.0)
    assert found.running == pytest.approx(5.263, abs=0.01)
    assert found.tpot_kept > 0.999


def test_kv_memory_bounds_a_batch() -> None:
    small = msgspec.structs.replace(CARD, kv_tokens=20_000)
    found = plans(2, [small], alike(4_000, 500), Goal(60_000, 500))
    assert {each.split.name: each.short for each in found}["1P1D"] == "KV memory"


def test_the_role_with_more_work_gets_more_nodes() -> None:
    long_prompts = plans(8, [CARD], alike(8_000, 50), Goal(2_000, 20))
    long_answers = plans(8, [CARD], alike(100, 2_000), Goal(2_000, 20))

    def best(found: list[Estimate]) -> Split:
        return next(each.split for each in found if each.split.prefill)

    assert best(long_prompts).prefill > best(long_prompts).decode
    assert best(long_answers).prefill == 1
    # Where it is short of prefill nodes, it says so, and the other way about.
    short = {
        each.split.name: each.short for each in plans(8, [CARD], alike(2_000, 300), Goal(2_000, 20))
    }
    assert (short["1P7D"], short["7P1D"]) == ("prefill", "decode")


def test_all_splits_are_there_and_no_gpu_is_idle() -> None:
    assert [each.name for each in splits(4, [CARD])] == ["4 colocated", "1P3D", "2P2D", "3P1D"]
    mixed = splits(4, [CARD, TWO])
    assert {each.name for each in mixed} == {
        "4 colocated", "2 colocated(TP 2)", "1P3D", "2P2D", "3P1D", "2P1D(TP 2)", "1P(TP 2)2D", "1P(TP 2)1D(TP 2)",
    }  # fmt: skip
    assert all(each.gpus == 4 for each in mixed)
    with pytest.raises(ConfigError, match="at least 1"):
        splits(0, [CARD])
    with pytest.raises(ConfigError, match="takes 2 GPUs"):
        splits(1, [TWO])
    with pytest.raises(ConfigError, match="two are for the same"):
        splits(4, [CARD, CARD])


def test_what_was_asked_before_is_cached() -> None:
    asks = [Asked(float(at), 1_000, 10, (1, 2, 10 + at)) for at in range(8)]
    assert demand_of(asks, 128).lengths == [(1_000, 256, 10)] * 6


@pytest.mark.parametrize("values", [(0, 10), (10, -1), (float("inf"), 10), (10, 10, 1.0)])
def test_targets_that_cannot_be_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        Goal(*values)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.just(0), st.integers(2, 3_000)), min_size=1, max_size=8),
    st.integers(1, 6), st.integers(1, 6), st.floats(0.01, 500), st.floats(10, 5_000), st.floats(5, 100),
)  # fmt: skip
def test_more_load_keeps_fewer_promises_and_more_nodes_keep_more(
    lengths: list[tuple[int, int, int]],
    prefill: int,
    decode: int,
    rate: float,
    ttft_ms: float,
    tpot_ms: float,
) -> None:
    demand, goal = Demand(lengths), Goal(ttft_ms, tpot_ms)

    def at(x: int, y: int, asked: float) -> tuple[float, float]:
        found = estimate(Split(x, y, CARD, CARD), demand, goal, asked)
        assert 0 <= found.ttft_kept <= 1
        assert 0 <= found.tpot_kept <= 1
        return found.ttft_kept + 1e-6, found.tpot_kept + 1e-6

    less, more = at(prefill, decode, rate), at(prefill, decode, rate * 1.5)
    assert more[0] <= less[0] + 2e-6
    # Of a target that most miss anyway, chance keeps the more the more it spreads.
    assert more[1] <= max(less[1], 0.5) + 2e-6
    assert at(prefill + 1, decode, rate)[0] >= less[0] - 2e-6
    assert at(prefill, decode + 1, rate)[1] >= min(less[1], 0.5) - 2e-6


def test_plans_are_sorted_and_keep_the_goal() -> None:
    rng = random.Random(3)
    demand = Demand([(rng.randrange(100, 4_000), 0, rng.randrange(10, 400)) for _ in range(100)])
    found = plans(6, [CARD], demand, Goal(500, 15))
    assert [each.rate for each in found] == sorted((each.rate for each in found), reverse=True)
    assert all(each.attained >= 0.899 for each in found)
