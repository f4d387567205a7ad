"""Which sizes are measured: what fits, coarse first, and nothing that a rate card would read
wrongly.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.planner.grid import Limits, mixed_sizes, sizes_of_transfers, units
from kvrelay.planner.rate_card import DecodePoint, PrefillPoint, RateCard

H200 = Limits(131_072, 800_000, 64, 256, 8192, prompts_at_once=3, decode_steps=24)
CPU = Limits(8192, 23_000, 16, 64, 128, prompts_at_once=3, decode_steps=24)

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


@given(limits)
def test_mixed_steps_fit(of: Limits) -> None:
    sizes = mixed_sizes(of)
    assert len(sizes) == len(set(sizes)) <= 8
    for requests, context, tokens in sizes:
        assert requests < of.max_num_seqs
        assert tokens <= of.step_tokens
        assert context + of.decode_steps < of.max_model_len
        decodes = requests * -(-(context + of.decode_steps + 1) // 16)
        assert decodes + of.prompts_at_once * -(-(tokens + 1) // 16) <= of.kv_tokens // 16


def test_what_a_cluster_meets_is_among_them() -> None:
    assert mixed_sizes(H200) == [(r, 1024, t) for r in (16, 128) for t in (64, 512, 2048, 8192)]
    assert mixed_sizes(CPU) == [(r, c, t) for r, c in ((4, 1024), (32, 512)) for t in (16, 32, 128)]
    prefill, decode = points("prefill", H200), points("decode", H200)
    assert {(16, 0), (1024, 0), (8192, 0), (8192, 4096), (2048, 16_384), (8192, 122_816)} <= set(
        prefill
    )
    assert {(1, 32), (1, 65_536), (32, 1024), (128, 4096), (256, 2048)} <= set(decode)
    assert (256, 4096) not in decode  # a million tokens
    assert {(128, 0), (16, 4096), (128, 4096)} <= set(points("prefill", CPU))
    assert {(1, 4096), (64, 128), (64, 256)} <= set(points("decode", CPU))


def test_leaps_of_large_batches_are_seen() -> None:
    requests = {requests for requests, _ in points("decode", H200)}
    assert sorted(requests) == [1, 2, 4, 8, 16, 32, 64, 72, 128, 136, 256]
    assert sorted({requests for requests, _ in points("decode", CPU)}) == [1, 2, 4, 8, 16, 32, 64]


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


@given(st.sampled_from([16, 64]), st.integers(1, 10**6), st.integers(1, 10**5))
def test_transfers_grow_from_a_block_to_the_longest_that_may_be(
    block_size: int, longest: int, most: int
) -> None:
    sizes = sizes_of_transfers(block_size, longest, most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= most
    assert (sizes[-1] - 1) * block_size < min(longest, 32_768)
    assert len(sizes) <= 8
