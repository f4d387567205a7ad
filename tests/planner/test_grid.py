"""Which sizes are measured: what fits, coarse first, and nothing that a rate card would read
wrongly.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.planner.grid import Limits, Step, plan
from kvrelay.planner.rate_card import Point, RateCard

H200 = Limits(131_072, 800_000, 64, 256, 8192, prompts_at_once=3, decode_steps=24)

limits = st.builds(
    Limits,
    max_model_len=st.integers(64, 200_000),
    kv_tokens=st.integers(20, 20_000).map(lambda blocks: blocks * 16),
    block_size=st.just(16),
    max_num_seqs=st.integers(1, 512),
    step_tokens=st.sampled_from([32, 128, 1000, 8192]),
    prompts_at_once=st.just(3),
    decode_steps=st.just(24),
)


def steps(of: Limits) -> list[Step]:
    return [step for _, group in plan(of) for step in group]


@given(limits)
def test_all_steps_fit_and_none_is_measured_twice(of: Limits) -> None:
    assert max(Counter(steps(of)).values()) == 1
    for requests, context, tokens in steps(of):
        assert 0 <= tokens <= of.step_tokens
        assert 0 <= requests <= of.max_num_seqs
        if not requests:
            assert tokens > 0
            assert context + tokens < of.max_model_len
            assert -(-(context + tokens + 1) // 16) * 3 <= of.kv_tokens // 16
        else:
            assert context + of.decode_steps < of.max_model_len
            # Even the smallest pool has room for one request.
            assert (
                requests == 1
                or -(-(context + of.decode_steps + 1) // 16) * requests <= of.kv_tokens // 16
            )


def line_of(step: Step) -> tuple[bool, int]:
    requests, context, _ = step
    return (True, requests) if requests else (False, context)


@given(limits)
def test_coarse_steps_come_first_and_a_line_begins_with_both_of_its_ends(of: Limits) -> None:
    groups = [
        (level, group) for level, group in plan(of) if not (group[0][0] and group[0][2])
    ]  # of prompts or of decodes alone
    assert [level for level, _ in groups] == sorted(level for level, _ in groups)
    assert {line_of(group[0])[0] for level, group in groups if not level} == {True, False}
    whole = [step for _, group in groups for step in group]
    seen = set()
    for _, group in groups:
        line = line_of(group[0])
        if line not in seen:
            seen.add(line)
            own = [step for step in whole if line_of(step) == line]
            assert {min(own), max(own)} == set(group)


def test_the_first_level_alone_is_a_card_that_is_exact_for_linear_times() -> None:
    def ms(requests: int, context: int, tokens: int) -> float:
        return 5 + 0.1 * requests + 0.1 * tokens + 0.001 * context

    first = [
        Point(ms(*step), step[2], step[1], step[0])
        for level, group in plan(H200)
        for step in group
        if not level
    ]
    card = RateCard(
        "m", "h", "0", "", H200.kv_tokens, 64, 256, 8192,
        [each for each in first if not each.requests], [each for each in first if each.requests],
    )  # fmt: skip
    for requests, context, tokens in steps(H200):
        if not requests:
            found = card.chunk_ms([(tokens, context)])
            assert abs(found - ms(0, context, tokens)) < 1e-6
        elif not tokens:
            found = card.step_ms(requests, requests * context)
            assert abs(found - ms(requests, context, 0)) < 1e-6
