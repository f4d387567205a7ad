"""Rate cards: exact where something was measured, linear between, and read only if they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.planner.rate_card import Point, RateCard, read_card, write_card
from kvrelay.wire.errors import ConfigError


def card(**changes: object) -> RateCard:
    whole = {
        "model": "tiny", "hardware": "CPU, 2 cores", "kvrelay": "0.1.0", "measured_at": "2026-11-22T00:00:00Z",
        "kv_tokens": 10_000, "block_size": 16, "max_num_seqs": 8, "step_tokens": 1_000,
        "prefill": [
            Point(10.0, 100), Point(100.0, 1_000), Point(20.0, 100, 1_000), Point(200.0, 1_000, 1_000),
        ],
        "decode": [
            Point(4.0, 0, 0, 1), Point(5.0, 0, 1_000, 1), Point(6.0, 0, 0, 8), Point(14.0, 0, 1_000, 8),
        ],
        "transfer": {"direct": [Point(1.0, 100), Point(2.0, 1_000)], "nixl": [Point(9.0, 100)]},
    }  # fmt: skip
    return RateCard(**(whole | changes))  # type: ignore[arg-type]


def test_what_was_measured_is_said_as_it_is() -> None:
    it = card()
    for point in it.prefill:
        assert it.chunk_ms([(point.tokens, point.context)]) == point.ms
    for point in it.decode:
        assert it.step_ms(point.requests, point.requests * point.context) == point.ms
    assert it.fetch_ms(1_000) == 2.0


def test_between_points_and_beyond_them_times_are_linear() -> None:
    it = card()
    assert it.chunk_ms([(550, 0)]) == pytest.approx(55.0)
    assert it.chunk_ms([(550, 500)]) == pytest.approx((55.0 + 110.0) / 2)
    assert it.chunk_ms([(10, 0)]) == 10.0  # a step has a least time
    assert it.step_ms(16, 0) == pytest.approx(6.0 + 2.0 * 8 / 7)
    assert it.fetch_ms(1_900) == pytest.approx(3.0)
    assert card(transfer={}).fetch_ms(5) == 0.0
    assert it.step_ms(0, 0) == 0.0


def test_a_long_prompt_is_computed_in_chunks_behind_each_other() -> None:
    it = card()
    assert it.prompt_ms(2_000) == pytest.approx(100.0 + 200.0)
    assert it.prompt_ms(2_000, cached=1_000) == pytest.approx(200.0)
    assert it.prompt_ms(500, cached=500) == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "is no rate card"),
        (b'{"model": 3}', "is no rate card"),
        (None, "cannot be read"),
        ({"version": 2}, "has version 2"),
        ({"decode": []}, "has no points"),
    ],
)
def test_what_is_none_is_refused_with_the_remedy(
    tmp_path: Path, text: bytes | dict[str, object] | None, says: str
) -> None:
    path = tmp_path / "card.json"
    if isinstance(text, dict):
        write_card(card(), path)
        assert read_card(path) == card()
        write_card(card(**text), path)
    elif text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=says) as error:
        read_card(path)
    assert "profile" in str(error.value)


def test_a_step_with_prompts_is_padded_to_the_next_shape() -> None:
    plain, it = card(), card(shapes=(100, 600, 1_000))
    each = it.costs.prompt_token
    assert it.chunk_ms([(550, 0)]) == pytest.approx(55.0 + 50 * each)
    assert it.chunk_ms([(400, 0), (200, 0)]) == plain.chunk_ms([(400, 0), (200, 0)])
    assert it.mixed_ms(8, 80, [(550, 0)]) == pytest.approx(
        plain.mixed_ms(8, 80, [(550, 0)]) + 42 * each
    )
    assert it.chunk_ms([(1_100, 0)]) == plain.chunk_ms([(1_100, 0)])
    assert it.step_ms(8, 80) == plain.step_ms(8, 80)
