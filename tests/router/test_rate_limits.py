"""Limits of keys: what was taken comes back, and whoever waits as long as he is told gets in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.admission.keys import Caller, KeyLimits, Refusal


def quota(**limits: int) -> Caller:
    return Caller("k", "0" * 64, **limits)  # type: ignore[arg-type]


BOTH = quota(requests_per_minute=6, tokens_per_minute=600)


def take(limits: KeyLimits, of: Caller, tokens: int = 0, now: float = 0.0) -> dict[str, str]:
    """The headers."""
    assert limits.take(of, tokens, now) is None
    return limits.headers(of, now)


def refused(limits: KeyLimits, of: Caller, tokens: int = 0, now: float = 0.0) -> Refusal:
    exceeded = limits.take(of, tokens, now)
    assert exceeded is not None
    return exceeded


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(0, 600), st.integers(0, 900), st.booleans()),
        max_size=40,
    )
)
def test_no_minute_sees_more_requests_than_the_limit_twice_and_the_wait_that_is_told_is_enough(
    asked: list[tuple[float, int, int, bool]],
) -> None:
    limits, now, begun = KeyLimits(), 0.0, []
    for pause, tokens, used, counts in asked:
        now += pause
        refusal = limits.take(BOTH, tokens, now)
        if refusal is not None:
            assert refusal.retry_after_s is not None
            now += math.ceil(refusal.retry_after_s)
            refusal = limits.take(BOTH, tokens, now)
        assert refusal is None
        if counts:
            begun.append(now)
        limits.give_back(BOTH, tokens, used if counts else None, now)
        # A full bucket and what flows in: never more than twice the limit in any minute.
        assert sum(now - 60 < at <= now for at in begun) <= 2 * BOTH.requests_per_minute
    assert limits._running["k"] == 0


@settings(max_examples=50)
@given(st.lists(st.integers(0, 600), min_size=1, max_size=30))
def test_over_a_long_time_tokens_keep_to_their_rate_whatever_was_thought(used: list[int]) -> None:
    limits, now, total = KeyLimits(), 0.0, 0
    some = quota(tokens_per_minute=600)
    for tokens in used:
        refusal = limits.take(some, 1, now)
        if refusal is not None:
            assert refusal.reason == "key_tokens"
            now += refusal.retry_after_s or 0.0
            refusal = limits.take(some, 1, now)
        assert refusal is None
        limits.give_back(some, 1, tokens, now)
        total += tokens
        assert (
            total <= 600 + now * 10 + 600 + 1e-3
        )  # the bucket, what flowed in, and the last answer


def test_concurrency_counts_what_is_under_way() -> None:
    limits, two = KeyLimits(), quota(max_running=2)
    take(limits, two)
    take(limits, two)
    assert refused(limits, two).reason == "key_concurrency"
    limits.give_back(two, 0, 10, 1.0)
    take(limits, two)
    assert refused(limits, two).reason == "key_concurrency"


def test_a_request_that_never_began_costs_nothing() -> None:
    limits, one = KeyLimits(), quota(requests_per_minute=1, tokens_per_minute=10)
    take(limits, one, 10)
    limits.give_back(one, 10, None, 0.0)
    assert take(limits, one, 10)["x-ratelimit-remaining-requests"] == "0"
    assert refused(limits, one, 1).retry_after_s == pytest.approx(60.0)


def test_another_quota_keeps_the_share_that_is_left() -> None:
    limits = KeyLimits()
    for _ in range(3):
        take(limits, BOTH, 100)
    more = take(limits, quota(requests_per_minute=60, tokens_per_minute=6_000))
    assert (more["x-ratelimit-remaining-requests"], more["x-ratelimit-remaining-tokens"]) == (
        "29",
        "3000",
    )
    assert take(limits, quota()) == {}


def test_what_can_never_be_taken_is_told_so() -> None:
    exceeded = refused(KeyLimits(), BOTH, 601)
    assert exceeded.retry_after_s is None
    assert "601" in exceeded.message
    assert "600" in exceeded.message
