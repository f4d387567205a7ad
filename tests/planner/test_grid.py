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


@given(limits)
def test_coarse_steps_come_first(of: Limits) -> None:
    levels = [level for level, _ in plan(of)]
    assert levels == sorted(levels)
    coarse = [step for level, group in plan(of) for step in group if not level]
    alone = [step for step in steps(of) if not (step[0] and step[2])]  # prompts, or decodes
    assert {min(alone), max(alone)} <= set(coarse)
    assert {bool(requests) for requests, *_ in coarse} == {True, False}


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
