"""Figures of requests whose times are known."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.load.measures import (
    Failure,
    Record,
    Targets,
    Window,
    client_health,
    measures_of,
    meets_targets,
    tpot_ms,
)

TARGETS = Targets(200.0, 15.0)


def request(
    due_s: float, ttft_ms: float = 100.0, gap_ms: float = 10.0, tokens: int = 11, **more: object
) -> Record:
    first = due_s + ttft_ms / 1e3
    gaps = [gap_ms / 1e3] * (tokens - 1)
    timed = (due_s, due_s, first, first + sum(gaps))
    record = Record(*(0, 0, *timed, 100, 20, tokens, tokens, tokens, True), gaps_s=gaps)
    return msgspec.structs.replace(record, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "good"),
    [
        (request(0), True),
        (request(0, ttft_ms=200.1), False),
        (request(0, ttft_ms=210.0, sent_s=0.06), False),  # it was sent late
        (request(0, ttft_ms=210.0, sent_s=0.06, turn=1), True),
        (request(0, gap_ms=15.1), False),
        (request(0, gap_ms=15.1, tokens=1), True),
        (request(0, failure="early end"), False),
    ],
)
def test_who_meets_the_targets(record: Record, good: bool) -> None:
    assert meets_targets(record, TARGETS) is good


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert tpot_ms(request(0, tokens=1)) is None


def test_the_warm_up_and_what_comes_after_do_not_count() -> None:
    records = [request(at / 2) for at in range(40)]
    records[3] = request(1.5, ttft_ms=5_000.0)
    found = measures_of(
        records, Window(2.0, 12.0), TARGETS, client_health(records, [0.0], open_loop=True)
    )
    assert (found.requests, found.attainment, found.offered_per_s) == (20, 1.0, 2.0)
    assert found.goodput_per_s == 2.0
    assert found.ttft_ms.most == pytest.approx(100)
    assert (found.tpot_ms.p50, found.itl_ms.p99) == pytest.approx((10, 10))
    assert found.e2e_ms.mean == pytest.approx(200)
    # Two a second of eleven tokens each, and the late one's came within the window.
    assert found.output_tokens_per_s == pytest.approx(23.1, abs=0.4)
    assert (found.prompt_tokens, found.output_tokens, found.cached) == (100, 11, 0.2)


def test_failures_are_counted_by_kind_and_meet_nothing() -> None:
    broken = [
        request(0.5, failure=kind, why="so")
        for kind in ("early end", "early end", str(Failure.CUT))
    ]
    found = measures_of(
        [request(0), *broken], Window(0, 10), TARGETS, client_health([], [], open_loop=False)
    )
    assert (found.requests, found.answered, found.attainment) == (4, 1, 0.25)
    assert found.failures == {"early end": 2, "cut at the end": 1}
    assert found.examples == ["early end: so", "cut at the end: so"]
    assert found.e2e_ms.most == pytest.approx(200)


def test_a_client_that_was_too_slow_says_so() -> None:
    late = [request(at, sent_s=at + 0.02) for at in range(3)]
    assert "20 ms late" in client_health(late, [0.0], open_loop=True).bottleneck
    assert client_health(late, [0.0], open_loop=False).bottleneck == ""
    assert "read up to 30 ms late" in client_health([], [0.03], open_loop=False).bottleneck
