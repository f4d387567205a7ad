"""The requests of a simulated run that count, its least length, and the bound of a split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.load.measures import Targets
from kvrelay.planner.goodput import bound_of, requests_needed, served
from kvrelay.planner.rate_card import Point, RateCard
from kvrelay.planner.setting import Result, Setting, Stream
from kvrelay.wire.errors import ConfigError

TARGETS = Targets(1_000.0, 100.0)
# A prompt takes 0.02 ms a token, a step of n requests 5 ms and 0.05 each, whatever their context.
CARD = RateCard(
    "m", "h", "0", "", kv_tokens=1_000_000, block_size=16, max_num_seqs=256, step_tokens=8_192,
    prefill=[Point(0.02, 1), Point(163.84, 8_192)],
    decode=[Point(5 + 0.05 * requests, 0, at, requests) for requests in (1, 256) for at in (0, 99_999)],
)  # fmt: skip


def answered(at_s: float, *, in_time: bool) -> Stream:
    stream = Stream(at_s * 1e3, 100, 201)
    stream.first = stream.at + 900.0
    stream.last = stream.first + 200 * (100.0 if in_time else 200.0)
    return stream


@pytest.mark.parametrize(("late_from_s", "kept"), [(22.0, 0.0), (50.0, 0.5), (79.0, 1.0)])
def test_what_comes_before_the_first_long_answer_has_ended_does_not_count(
    late_from_s: float, kept: float
) -> None:
    streams = [answered(at / 10, in_time=at / 10 < late_from_s) for at in range(1_001)]
    result = Result(Setting(card=CARD, targets=TARGETS), streams)
    assert served(result, 10.0).attained == pytest.approx(kept, abs=0.02)


def test_a_run_is_as_long_as_several_long_answers() -> None:
    short, long = ([Stream(0.0, 100, output)] * 9 for output in (20, 5_000))
    assert requests_needed(short, TARGETS, 100.0) == 2_000
    assert requests_needed(short, TARGETS, 1_000_000.0) > 4_000
    assert requests_needed(short, TARGETS, 0.01) == 400
    assert requests_needed(long, TARGETS, 10.0) == 10 * 5 * 501


def bound(prefill: int, decode: int, *asks: Stream, tpot_ms: float = 10.0) -> tuple[float, str]:
    targets = Targets(1_000.0, tpot_ms)
    return bound_of(Setting(prefill=prefill, decode=decode, card=CARD, targets=targets), asks)


def test_a_bound_is_the_time_of_nodes_by_the_time_of_a_request() -> None:
    """Steps of 10 ms hold 100 requests, so 100 tokens take 10 ms; a prompt of 1,000 takes 20."""
    asked = Stream(0.0, 1_000, 100)
    assert bound(0, 2, asked) == (pytest.approx(2 / 0.03, rel=0.01), "time")
    assert bound(3, 1, asked) == (pytest.approx(1 / 0.01, rel=0.01), "decode")
    # Decode nodes compute what prefill nodes have no time for.
    assert bound(1, 3, asked) == (pytest.approx(4 / 0.03, rel=0.01), "prefill")


def test_what_was_asked_before_is_cached() -> None:
    asks = [Stream(float(at), 1_000, 2, (1, 2, 3, 4, 5, 6, 10 + at)) for at in range(8)]
    apart = [Stream(float(at), 1_000, 2, tuple(range(10 * at, 10 * at + 7))) for at in range(8)]
    assert bound(1, 1, *asks)[0] > 2 * bound(1, 1, *apart)[0]


@pytest.mark.parametrize("values", [(0, 10), (10, -1), (float("inf"), 10), (10, float("nan"))])
def test_targets_that_cannot_be_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ConfigError):
        Targets(*values)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.builds(Stream, st.just(0.0), st.integers(1, 20_000), st.integers(2, 3_000)), min_size=1, max_size=8),
    st.integers(1, 6), st.integers(1, 6), st.floats(5, 100),
)  # fmt: skip
def test_more_nodes_and_looser_targets_never_have_less_time(
    asks: list[Stream], prefill: int, decode: int, tpot_ms: float
) -> None:
    found = bound(prefill, decode, *asks, tpot_ms=tpot_ms)[0]
    assert found > 0
    for more in (
        bound(prefill + 1, decode, *asks, tpot_ms=tpot_ms),
        bound(prefill, decode + 1, *asks, tpot_ms=tpot_ms),
        bound(prefill, decode, *asks, tpot_ms=tpot_ms * 2),
    ):
        assert more[0] >= found * 0.999
