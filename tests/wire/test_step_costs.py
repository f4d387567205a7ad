"""What a step costs, and how much of prompts it has room for."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.wire.step_costs import TARGET_USED, Pace, StepBudget, StepCosts

H200 = StepCosts(3.9, 0.014, 2.4e-5, 0.5, 0.0205, 1.05e-6)
"""About those of an H200 with 8 billion parameters."""
BLOCK = 64


def test_a_step_is_the_sum_of_what_it_holds() -> None:
    assert H200.decode_ms(32, 32 * 1024) == pytest.approx(3.9 + 32 * 0.014 + 32 * 1024 * 2.4e-5)
    assert H200.prompt_ms(2048) == pytest.approx(3.9 + 0.5 + 2048 * 0.0205 + 1.05e-6 * 2048 * 1024)
    assert H200.chunk_ms(2048, 8192) - H200.chunk_ms(2048) == pytest.approx(1.05e-6 * 2048 * 8192)


@given(st.floats(0.1, 500), st.integers(0, 200_000), st.sampled_from([1.05e-6, 1e-12, 5e-23, 0.0]))
def test_as_many_tokens_as_there_is_time_for(ms: float, start: int, prompt_context: float) -> None:
    costs = msgspec.structs.replace(H200, prompt_context=prompt_context)
    tokens = costs.tokens_within(ms, start)
    assert costs.chunk_ms(tokens, start) <= ms * 1.000001
    assert costs.chunk_ms(tokens + 1, start) > ms * 0.999999


def test_a_step_beside_decodes_keeps_to_the_gap_and_one_without_to_its_tokens() -> None:
    budget = StepBudget(8192, BLOCK, H200, gap_ms=50.0)
    assert budget.room(0, 0).take(10_000, 0) == 8192
    taken = budget.room(100, 100_000).take(10_000, 0)
    assert H200.decode_ms(100, 100_000) + 0.5 + H200.chunk_ms(taken) == pytest.approx(
        47.5, abs=0.03
    )
    assert budget.room(100, 100_000).take(10_000, 100_000) < taken, (
        "attention over what was before takes time, too"
    )


def test_prompts_do_not_starve_beside_decodes_that_take_longer_than_the_gap() -> None:
    room = StepBudget(8192, BLOCK, H200, gap_ms=5.0).room(200, 1_000_000)
    assert room.is_open
    assert room.take(10_000, 0) == BLOCK
    assert not room.is_open


def test_a_step_takes_up_no_further_prompt_once_its_fixed_part_is_a_tenth_of_it() -> None:
    budget = StepBudget(8192, BLOCK, H200, gap_ms=50.0)
    room, prompts = budget.room(0, 0), 0
    while room.is_open:
        assert room.take(100, 0) == 100
        prompts += 1
    enough = 9 * (H200.step + H200.prompts) / H200.chunk_ms(100)
    assert enough <= prompts < enough + 1
    room = budget.room(0, 0)
    assert (room.take(100, 0), room.take(20_000, 0)) == (100, 8092), (
        "who is taken up may have all the rest"
    )
    assert not room.is_open


def test_rows_that_pad_a_step_are_filled_and_a_cut_prompt_pads_none() -> None:
    hidden = StepCosts(5.5, 0.009, 4.5e-5, -4.4, 0.0222, 8e-7)
    shapes = 32, 64, 128, 256, 512, 1024, 1152, 1664, 2176
    budget = StepBudget(8192, BLOCK, hidden, 50.0, shapes)
    room = budget.room(128, 128 * 1024)
    assert [room.take(1000, 0), room.take(1000, 0)] == [1000, 536]
    assert not room.is_open
    room = budget.room(0, 0)
    assert room.take(1000, 0) == 1000
    assert room.is_open, "24 more are computed anyway"
    assert room.take(1000, 0) == 24
    assert not room.is_open
    assert budget.room(0, 0).take(5000, 0) == 5000, "where nobody waits for a token nothing is cut"
    alone, beside = budget.room(0, 0), budget.room(1, 0)
    assert (alone.padded(0), alone.padded(33), alone.padded(2049)) == (0, 64, 2176)
    assert (beside.padded(31), beside.padded(32), beside.padded(2176)) == (31, 63, 2176)


def test_a_step_of_chunks_is_the_sum_of_its_decodes_and_prompts() -> None:
    chunks = [(1, 500), (1, 700), (300, 0), (64, 4000)]
    prompts = H200.prompts + H200.chunk_ms(300) + H200.chunk_ms(64, 4000)
    assert H200.step_ms(chunks) == pytest.approx(H200.decode_ms(2, 1200) + prompts)
    assert H200.step_ms(chunks[:2]) == pytest.approx(H200.decode_ms(2, 1200))


def test_the_pace_follows_what_lasts_and_no_pause() -> None:
    pace = Pace()
    pace.saw(60_000, 10)
    assert pace.factor == pytest.approx(1.03)
    for _ in range(200):
        pace.saw(40, 10)
    assert pace.factor == pytest.approx(4, rel=0.03)
    for _ in range(500):
        pace.saw(0.01, 10)
    assert pace.factor == pytest.approx(1 / 16)


def test_without_costs_a_step_has_its_tokens_alone() -> None:
    room = StepBudget(128, 16).room(1000, 1_000_000)
    assert room.take(63, 0) == 63
    assert room.is_open
    assert room.take(10, 0) == 10
    assert not room.is_open
    assert room.ms == math.inf


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 50_000)), min_size=1, max_size=20),
    st.integers(0, 256),
    st.floats(1, 200),
)
def test_no_step_takes_longer_than_the_gap_but_for_one_block(
    prompts: list[tuple[int, int]], rows: int, gap_ms: float
) -> None:
    budget = StepBudget(8192, BLOCK, H200, gap_ms / TARGET_USED)
    room, ms, tokens = (
        budget.room(rows, rows * 1000),
        H200.decode_ms(rows, rows * 1000) + H200.prompts,
        0,
    )
    for number, (wanted, start) in enumerate(prompts):
        if not room.is_open:
            break
        count = room.take(wanted, start)
        assert 0 < count <= wanted
        tokens += count
        ms += H200.chunk_ms(count, start)
        if rows and number == 0:
            assert (
                ms
                <= max(
                    gap_ms, H200.decode_ms(rows, rows * 1000) + 0.5 + H200.chunk_ms(BLOCK, start)
                )
                + 1e-6
            )
        elif rows:
            assert ms <= gap_ms + H200.chunk_ms(1, start) + 1e-6
    assert tokens <= 8192


@given(
    st.integers(1, 250),
    st.integers(50, 4_000),
    st.lists(st.integers(2, 3_000), min_size=1, max_size=40),
)
def test_rows_that_only_pad_a_step_have_their_time_too(
    rows: int, context: int, prompts: list[int]
) -> None:
    """Seen on an H100: 15 prompts of 128 tokens were computed as 2,048 tokens, for which there was
    no time.
    """
    costs = StepCosts(5.54, 0.0104, 0.0000431, -2.62, 0.02115, 0.000000975)
    shapes = (256, 512, 1024, 1536, 2048)
    budget = StepBudget(8192, 16, costs, 50.0, shapes)
    room = budget.room(rows, rows * context)
    for tokens in prompts:
        if not room.is_open:
            break
        assert room.take(tokens, 0) > 0
    padded_ms = (
        costs.decode_ms(rows, rows * context)
        + costs.prompts
        + costs.prompt_token * room.padded(room.taken)
    )
    assert padded_ms <= 50.0 or room.taken <= max(16, shapes[0])
