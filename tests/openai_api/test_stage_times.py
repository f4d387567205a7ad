"""When stages were, out of how long they took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.openai_api.stages import STAGES, StageTime, stage_times
from kvrelay.wire.engine_messages import Timing

SECONDS = st.floats(0, 100)


def rounded(times: list[StageTime]) -> list[tuple[str, float, float]]:
    return [(name, round(start, 6), round(end, 6)) for name, start, end in times]


def test_a_leg_that_computes_its_prompt() -> None:
    timing = Timing(queue_s=1, prefill_s=2, decode_s=4, first_step_s=0.5)
    assert rounded(stage_times(timing, 10, 17.25)) == [
        ("queue", 10.25, 11.25),
        ("prefill", 11.25, 13.25),
        ("first_step", 13.25, 13.75),
        ("decode", 13.25, 17.25),
    ]


def test_a_leg_that_fetches_its_kv() -> None:
    timing = Timing(transfer_s=3, exposed_s=0.5, decode_queue_s=1.25, first_step_s=0.5, decode_s=4)
    assert rounded(stage_times(timing, 9, 17)) == [
        ("decode_queue", 9, 10),
        ("transfer", 10, 13),
        ("exposed", 12.5, 13),
        ("decode_queue", 13, 13.25),
        ("first_step", 13.25, 13.75),
        ("decode", 13, 17),
    ]


def test_a_fetch_that_failed_comes_before_the_prefill() -> None:
    timing = Timing(transfer_s=3, decode_queue_s=1, prefill_s=2, decode_s=4)
    assert rounded(stage_times(timing, 0, 10)) == [
        ("decode_queue", 0, 1),
        ("transfer", 1, 4),
        ("prefill", 4, 6),
        ("decode", 6, 10),
    ]


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_no_stage_is_outside_its_leg(
    queue: float,
    prefill: float,
    transfer: float,
    decode: float,
    exposed: float,
    waited: float,
    first: float,
    whole: float,
) -> None:
    timing = Timing(queue, prefill, transfer, decode, 0, exposed, waited, first)
    for name, start, end in stage_times(timing, 5, 5 + whole):
        assert name in STAGES
        assert 5 <= start < end <= 5 + whole
