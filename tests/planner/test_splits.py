"""Splits of GPUs, and the most that each has time for: known answers, and what holds of any."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.load.workloads import Asked
from kvrelay.planner.rate_card import Point, RateCard
from kvrelay.planner.setting import Targets
from kvrelay.planner.splits import Split, bound_of, splits
from kvrelay.wire.errors import ConfigError

# A prompt takes 0.02 ms a token, a step of n requests 5 ms and 0.05 each, whatever their context.
CARD = RateCard(
    "m", "h", "0", "", kv_tokens=1_000_000, block_size=16, max_num_seqs=256, step_tokens=8_192,
    prefill=[Point(0.02, 1), Point(163.84, 8_192)],
    decode=[Point(5 + 0.05 * requests, 0, at, requests) for requests in (1, 256) for at in (0, 99_999)],
)  # fmt: skip
TWO = msgspec.structs.replace(CARD, tensor_parallel_size=2)


def rate(prefill: int, decode: int, *asks: Asked, tpot_ms: float = 10.0) -> tuple[float, str]:
    return bound_of(Split(prefill, decode, CARD, CARD), asks, 128, tpot_ms)


def test_a_bound_is_the_time_of_nodes_by_the_time_of_a_request() -> None:
    """Steps of 10 ms hold 100 requests, so 100 tokens take 10 ms; a prompt of 1,000 takes 20."""
    asked = Asked(0.0, 1_000, 100)
    assert rate(0, 2, asked) == (pytest.approx(2 / 0.03, rel=0.01), "time")
    assert rate(3, 1, asked) == (pytest.approx(1 / 0.01, rel=0.01), "decode")
    # Decode nodes compute what prefill nodes have no time for.
    assert rate(1, 3, asked) == (pytest.approx(4 / 0.03, rel=0.01), "prefill")


def test_what_was_asked_before_is_cached() -> None:
    asks = [Asked(float(at), 1_000, 2, (1, 2, 3, 4, 5, 6, 10 + at)) for at in range(8)]
    apart = [Asked(float(at), 1_000, 2, tuple(range(10 * at, 10 * at + 7))) for at in range(8)]
    assert rate(1, 1, *asks)[0] > 2 * rate(1, 1, *apart)[0]


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


@pytest.mark.parametrize("values", [(0, 10), (10, -1), (float("inf"), 10), (10, float("nan"))])
def test_targets_that_cannot_be_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ConfigError):
        Targets(*values)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.builds(Asked, st.just(0.0), st.integers(1, 20_000), st.integers(2, 3_000)), min_size=1, max_size=8),
    st.integers(1, 6), st.integers(1, 6), st.floats(5, 100),
)  # fmt: skip
def test_more_nodes_and_looser_targets_never_have_less_time(
    asks: list[Asked], prefill: int, decode: int, tpot_ms: float
) -> None:
    bound = rate(prefill, decode, *asks, tpot_ms=tpot_ms)[0]
    assert bound > 0
    for more in (
        rate(prefill + 1, decode, *asks, tpot_ms=tpot_ms),
        rate(prefill, decode + 1, *asks, tpot_ms=tpot_ms),
        rate(prefill, decode, *asks, tpot_ms=tpot_ms * 2),
    ):
        assert more[0] >= bound * 0.999
