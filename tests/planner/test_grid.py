"""Which sizes are measured: what fits, coarse first, and nothing that a rate card would read
wrongly.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.planner.grid import Limits, units
from kvrelay.planner.rate_card import DecodePoint, PrefillPoint, RateCard

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


def points(kind: str, of: Limits) -> list[tuple[int, int]]:
    return [point for unit in units(of) if unit.kind == kind for point in unit.points]


@given(limits)
def test_all_points_fit_and_none_is_measured_twice(of: Limits) -> None:
    for kind in ("prefill", "decode"):
        assert max(Counter(points(kind, of)).values()) == 1
    for tokens, context in points("prefill", of):
        assert 0 < tokens <= of.step_tokens
        assert context + tokens < of.max_model_len
        assert -(-(context + tokens + 1) // 16) * 3 <= of.kv_tokens // 16
    for requests, context in points("decode", of):
        assert 0 < requests <= of.max_num_seqs
        assert context + of.decode_steps < of.max_model_len
        # Even the smallest pool has room for one request.
        assert (
            requests == 1
            or -(-(context + of.decode_steps + 1) // 16) * requests <= of.kv_tokens // 16
        )


@given(limits)
def test_coarse_points_come_first_and_a_line_begins_with_both_of_its_ends(of: Limits) -> None:
    plan = units(of)
    assert [unit.level for unit in plan] == sorted(unit.level for unit in plan)
    assert {unit.kind for unit in plan if not unit.level} == {"prefill", "decode"}
    seen = set()
    for unit in plan:
        line = (unit.kind, unit.points[0][1] if unit.kind == "prefill" else unit.points[0][0])
        if line not in seen:
            seen.add(line)
            whole = [
                at
                for at in points(unit.kind, of)
                if at[1 if unit.kind == "prefill" else 0] == line[1]
            ]
            assert {min(whole), max(whole)} == set(unit.points)


def test_the_first_level_alone_is_a_card_that_is_exact_for_linear_times() -> None:
    def prefill_ms(tokens: int, context: int) -> float:
        return 5 + 0.1 * tokens + 0.001 * context

    def decode_ms(requests: int, context: float) -> float:
        return 4 + 0.1 * requests + 0.002 * context

    first = [unit for unit in units(H200) if not unit.level]
    card = RateCard(
        "m", "h", "0", "", H200.kv_tokens, 64, 256, 8192,
        [PrefillPoint(*at, prefill_ms(*at)) for unit in first if unit.kind == "prefill" for at in unit.points],
        [DecodePoint(*at, decode_ms(*at)) for unit in first if unit.kind == "decode" for at in unit.points],
    )  # fmt: skip
    for tokens, context in points("prefill", H200):
        assert abs(card.chunk_ms(tokens, context) - prefill_ms(tokens, context)) < 1e-6
    for requests, context in points("decode", H200):
        assert abs(card.step_ms(requests, requests * context) - decode_ms(requests, context)) < 1e-6
