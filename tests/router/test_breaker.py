"""A breaker, and what the requests on a node tell its two breakers, with times given by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.nodes.breaker import (
    FAILURES_IN_A_ROW,
    OPEN_CAP_S,
    Breaker,
    BreakerCall,
    State,
    Verdict,
)


class Fixed(random.Random):
    """Draws no jitter."""

    def random(self) -> float:
        return 0.0


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(Fixed())


def enter(breaker: Breaker, now: float) -> object:
    leg = object()
    breaker.enter(leg, now)
    return leg


def fail(breaker: Breaker, times: int, now: float) -> None:
    for _ in range(times):
        breaker.failed(enter(breaker, now), "500", now)


def succeed(breaker: Breaker, now: float) -> None:
    breaker.succeeded(enter(breaker, now), now)


def test_it_opens_after_failures_in_a_row_and_not_before(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW - 1, 1.0)
    succeed(breaker, 1.0)
    fail(breaker, FAILURES_IN_A_ROW - 1, 1.0)
    assert breaker.state(1.0) is State.CLOSED
    fail(breaker, 1, 1.0)
    assert (breaker.state(1.0), breaker.why) == (State.OPEN, "500")
    assert breaker.verdict(1.0) is Verdict.LAST


@pytest.mark.parametrize("ends", [True, False])
def test_half_open_lets_one_through_and_closes_when_it_answers(
    breaker: Breaker, ends: bool
) -> None:
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    assert breaker.verdict(0.5) is Verdict.LAST
    now = breaker.opens_in(0.0)
    assert (breaker.state(now), breaker.verdict(now)) == (State.HALF_OPEN, Verdict.TAKES)
    probe, other = enter(breaker, now), enter(breaker, now)
    assert breaker.verdict(now) is Verdict.NEVER
    breaker.answered(other, now)
    breaker.succeeded(other, now)
    assert breaker.state(now) is State.HALF_OPEN
    (breaker.succeeded if ends else breaker.answered)(probe, now)
    assert (breaker.state(now), breaker.verdict(now)) == (State.CLOSED, Verdict.TAKES)


def test_openings_double_up_to_a_limit_and_are_forgotten_when_it_goes_well(
    breaker: Breaker,
) -> None:
    now, lengths = 0.0, []
    fail(breaker, FAILURES_IN_A_ROW, now)
    for _ in range(10):
        lengths.append(breaker.opens_in(now))
        now += lengths[-1]
        fail(breaker, 1, now)
    assert lengths[:4] == [1.0, 2.0, 4.0, 8.0]
    assert lengths[-1] == OPEN_CAP_S
    now += OPEN_CAP_S
    succeed(breaker, now)
    fail(breaker, FAILURES_IN_A_ROW, now + 1)
    assert breaker.opens_in(now + 1) == OPEN_CAP_S  # it has only just come back
    now += 1 + OPEN_CAP_S
    succeed(breaker, now)
    fail(breaker, FAILURES_IN_A_ROW, now + 1000)
    assert breaker.opens_in(now + 1000) == 1.0


def test_a_last_node_is_tried_by_one_leg_at_a_time_though_it_is_open(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    assert breaker.verdict(0.1) is Verdict.LAST
    probe = enter(breaker, 0.1)
    assert breaker.verdict(0.1) is Verdict.NEVER
    breaker.failed(probe, "x", 0.2)
    assert breaker.verdict(0.2) is Verdict.LAST
    assert breaker.opens_in(0.2) == pytest.approx(0.8)  # what was tried early does not prolong it
    succeed(breaker, 0.3)
    assert breaker.state(0.3) is State.CLOSED


def test_legs_sent_before_the_opening_change_nothing_later(breaker: Breaker) -> None:
    good, bad = enter(breaker, 0.0), enter(breaker, 0.0)
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    breaker.succeeded(good, 0.1)
    breaker.failed(bad, "late", 0.1)
    assert (breaker.state(0.1), breaker.opens_in(0.0)) == (State.OPEN, 1.0)
    breaker.failed(bad, "late", 1.0)
    breaker.succeeded(good, 1.0)
    assert breaker.state(1.0) is State.HALF_OPEN


def test_rest_is_as_long_as_the_node_says(breaker: Breaker) -> None:
    breaker.rest(7.0, 1.0)
    assert [breaker.verdict(now) for now in (2.0, 7.9, 8.0)] == [
        Verdict.RESTS,
        Verdict.RESTS,
        Verdict.TAKES,
    ]
    assert breaker.state(2.0) is State.CLOSED
    fail(breaker, FAILURES_IN_A_ROW, 2.0)
    assert breaker.verdict(2.0) is Verdict.NEVER


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "answer", "good", "bad", "drop", "wait"]), st.floats(0, 40)
        )
    ),
    st.integers(),
)
def test_whatever_happens_probes_are_few_and_openings_bounded(
    events: list[tuple[str, float]], seed: int
) -> None:
    breaker, now, legs, probes = Breaker(random.Random(seed)), 0.0, list[object](), list[object]()
    for what, seconds in events:
        if what == "begin" and breaker.verdict(now) in (Verdict.TAKES, Verdict.LAST):
            probe = breaker.state(now) is not State.CLOSED
            legs.append(enter(breaker, now))
            probes += legs[-1:] * probe
        elif what == "wait":
            now += seconds
        elif legs and what == "answer":
            breaker.answered(legs[0], now)
        elif legs:
            leg = legs.pop(0)
            if what == "good":
                breaker.succeeded(leg, now)
            elif what == "bad":
                breaker.failed(leg, "x", now)
            breaker.leave(leg)
        probes = [leg for leg in probes if leg in legs and breaker.state(now) is not State.CLOSED]
        assert len(probes) <= 1
        assert (breaker.state(now) is State.OPEN) == (breaker.opens_in(now) > 0)
        assert breaker.opens_in(now) <= OPEN_CAP_S
        if breaker.state(now) is State.OPEN:
            assert breaker.verdict(now) in (Verdict.LAST, Verdict.NEVER)
        if not legs:
            assert breaker.verdict(now) is not Verdict.NEVER
    assert breaker.state(now + 300.0) is not State.OPEN  # whatever it was, it is tried again


# Requests of both roles on one node.

NOW = 1.0


@pytest.fixture
def prefill() -> Breaker:
    return Breaker(Fixed())


@pytest.fixture
def decode() -> Breaker:
    return Breaker(Fixed())


def call(prefill: Breaker, decode: Breaker, now: float = NOW, tokens: int = 0) -> BreakerCall:
    """A decode request that computes its prompt itself, after so many frames with tokens."""
    request = BreakerCall(prefill, decode, now)
    for _ in range(tokens):
        request.heard(now)
    return request


def opened(prefill: Breaker, decode: Breaker, tokens: int) -> Breaker:
    """The breaker that opens when legs break after so many tokens."""
    for _ in range(FAILURES_IN_A_ROW):
        call(prefill, decode, tokens=tokens).failed("it broke", NOW)
    (found,) = {each for each in (prefill, decode) if each.state(NOW) is State.OPEN}
    return found


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_leg_that_computes_its_prompt_speaks_for_both_kinds(
    tokens: int, prefill: Breaker, decode: Breaker
) -> None:
    breaker = opened(prefill, decode, tokens)
    assert breaker is (decode if tokens else prefill)
    now = NOW + breaker.opens_in(NOW)
    assert breaker.state(now) is State.HALF_OPEN
    call(prefill, decode, now, tokens=tokens).succeeded(now)
    assert breaker.state(now) is State.CLOSED


def test_of_decoding_the_second_token_speaks_and_the_first_does_not(
    prefill: Breaker, decode: Breaker
) -> None:
    now = NOW + opened(prefill, decode, tokens=1).opens_in(NOW)
    for tokens in (0, 1):
        for _ in range(4):
            call(prefill, decode, now, tokens).close()  # its client has gone
        assert decode.state(now) is State.HALF_OPEN
        assert decode.verdict(now) is Verdict.TAKES
    call(prefill, decode, now, tokens=2).close()
    assert decode.state(now) is State.CLOSED


def test_what_breaks_before_its_first_token_gives_the_probe_of_decoding_back(
    prefill: Breaker, decode: Breaker
) -> None:
    now = NOW + opened(prefill, decode, tokens=1).opens_in(NOW)
    for _ in range(FAILURES_IN_A_ROW - 1):
        call(prefill, decode, now).failed("it broke", now)
        assert decode.verdict(now) is Verdict.TAKES
    assert decode.state(now) is State.HALF_OPEN
