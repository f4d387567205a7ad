"""A breaker, with times given by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.nodes.node import FAILURES_IN_A_ROW, OPEN_CAP_S, Breaker, State


@pytest.fixture
def breaker() -> Breaker:
    return Breaker()


def begin(breaker: Breaker) -> object:
    request = object()
    breaker.begin(request)
    return request


def verdict(breaker: Breaker, now: float) -> str:
    if breaker.may_take(now):
        assert breaker.may_take(now, last=True)
        return "takes"
    return "last" if breaker.may_take(now, last=True) else "never"


def fail(breaker: Breaker, times: int, now: float) -> None:
    for _ in range(times):
        breaker.failed(begin(breaker), "500", now)


def test_it_opens_after_failures_in_a_row_and_not_before(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW - 1, 1.0)
    breaker.succeeded(begin(breaker))
    fail(breaker, FAILURES_IN_A_ROW - 1, 1.0)
    assert breaker.state(1.0) is State.CLOSED
    fail(breaker, 1, 1.0)
    assert (breaker.state(1.0), breaker.shown(1.0).reason) == (State.OPEN, "500")
    assert verdict(breaker, 1.0) == "last"


def test_half_open_lets_one_through_and_closes_when_it_succeeds(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    assert verdict(breaker, 0.5) == "last"
    now = breaker.opens_in(0.0)
    assert (breaker.state(now), verdict(breaker, now)) == (State.HALF_OPEN, "takes")
    for _ in range(2):
        gone = begin(breaker)
        assert verdict(breaker, now) == "never"
        breaker.end(gone)  # its client went away
        assert verdict(breaker, now) == "takes"
    trial, other = begin(breaker), begin(breaker)
    assert verdict(breaker, now) == "never"
    breaker.succeeded(other)
    assert breaker.state(now) is State.HALF_OPEN
    breaker.succeeded(trial)
    assert (breaker.state(now), verdict(breaker, now)) == (State.CLOSED, "takes")


def test_tokens_close_after_a_trial_and_forgive_no_other_failures(breaker: Breaker) -> None:
    for _ in range(FAILURES_IN_A_ROW):
        request = begin(breaker)
        breaker.answered(request)
        breaker.failed(request, "it breaks midway", 0.0)
    assert breaker.state(0.0) is State.OPEN
    breaker.answered(object())
    assert breaker.state(0.0) is State.OPEN
    breaker.answered(begin(breaker))
    assert breaker.state(0.0) is State.CLOSED


def test_openings_double_up_to_a_limit_until_a_trial_succeeds(breaker: Breaker) -> None:
    now, lengths = 0.0, []
    fail(breaker, FAILURES_IN_A_ROW, now)
    for _ in range(10):
        lengths.append(breaker.opens_in(now))
        now += lengths[-1]
        fail(breaker, 1, now)
    assert lengths[:4] == [1.0, 2.0, 4.0, 8.0]
    assert lengths[-1] == OPEN_CAP_S
    now += OPEN_CAP_S
    breaker.succeeded(begin(breaker))
    fail(breaker, FAILURES_IN_A_ROW, now)
    assert breaker.opens_in(now) == 1.0


def test_requests_sent_before_the_opening_change_nothing_later(breaker: Breaker) -> None:
    good, bad = begin(breaker), begin(breaker)
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    for now in (0.1, 1.0):
        breaker.succeeded(good)
        breaker.failed(bad, "late", now)
    assert breaker.opens_in(0.0) == 1.0
    assert breaker.state(1.0) is State.HALF_OPEN


def test_rest_is_as_long_as_the_node_says(breaker: Breaker) -> None:
    breaker.rest(7.0, 1.0)
    assert [verdict(breaker, now) for now in (2.0, 7.9, 8.0)] == [
        "never",
        "never",
        "takes",
    ]
    assert breaker.state(2.0) is State.CLOSED
    fail(breaker, FAILURES_IN_A_ROW, 2.0)
    assert verdict(breaker, 2.0) == "never"
    assert [breaker.rests(now) for now in (2.9, 3.0, 8.0)] == [False, True, False]


steps = st.tuples(st.sampled_from(["begin", "good", "bad", "drop", "wait"]), st.floats(0, 40))


@given(st.lists(steps))
def test_whatever_happens_trials_are_few_and_openings_bounded(
    events: list[tuple[str, float]],
) -> None:
    breaker, now, requests, trials = Breaker(), 0.0, list[object](), list[object]()
    for what, seconds in events:
        if what == "begin" and verdict(breaker, now) in ("takes", "last"):
            trial = breaker.state(now) is not State.CLOSED
            requests.append(begin(breaker))
            trials += requests[-1:] * trial
        elif what == "wait":
            now += seconds
        elif requests:
            request = requests.pop(0)
            if what == "good":
                breaker.succeeded(request)
            elif what == "bad":
                breaker.failed(request, "x", now)
            breaker.end(request)
        closed = breaker.state(now) is State.CLOSED
        trials = [each for each in trials if each in requests and not closed]
        assert len(trials) <= 1
        assert (breaker.state(now) is State.OPEN) == (breaker.opens_in(now) > 0)
        assert breaker.opens_in(now) <= OPEN_CAP_S
        if breaker.state(now) is State.OPEN:
            assert verdict(breaker, now) in ("last", "never")
        if not requests:
            assert verdict(breaker, now) != "never"
    assert breaker.state(now + OPEN_CAP_S) is not State.OPEN  # whatever it was, it is tried again
