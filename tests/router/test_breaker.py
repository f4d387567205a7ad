"""The breaker of one node and kind of leg, with times given by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.nodes.breaker import FAILURES_IN_A_ROW, OPEN_CAP_S, PROBES, SUCCESSES, WINDOW_LEGS, Breaker, State


class Fixed(random.Random):
    """Draws no jitter."""

    def random(self) -> float:
        return 0.0


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(Fixed())


def fail(breaker: Breaker, times: int, now: float) -> None:
    for _ in range(times):
        breaker.failed(now, "500", probe=breaker.begin(now))


def test_it_opens_after_failures_in_a_row_and_not_before(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW - 1, 1.0)
    breaker.succeeded(1.0, probe=breaker.begin(1.0))
    fail(breaker, FAILURES_IN_A_ROW - 1, 1.0)
    assert breaker.state(1.0) is State.CLOSED
    fail(breaker, 1, 1.0)
    assert (breaker.state(1.0), breaker.why) == (State.OPEN, "500")


def test_half_of_many_legs_within_the_window_open_it_too(breaker: Breaker) -> None:
    for at in range(WINDOW_LEGS):
        assert breaker.state(at * 0.1) is State.CLOSED
        (breaker.failed(at * 0.1, "x", probe=False) if at % 2 else breaker.succeeded(at * 0.1, probe=False))
    assert breaker.state(2.0) is State.OPEN


def test_what_failed_long_ago_is_forgotten(breaker: Breaker) -> None:
    for at in range(4 * WINDOW_LEGS):
        now = at * 10.0
        (breaker.failed(now, "x", probe=False) if at % 2 else breaker.succeeded(now, probe=False))
        assert breaker.state(now) is State.CLOSED
        breaker.check()


def test_refusals_and_clients_that_go_away_say_nothing(breaker: Breaker) -> None:
    for _ in range(100):
        breaker.dropped(probe=breaker.begin(1.0))
    assert breaker.state(1.0) is State.CLOSED


def test_half_open_lets_a_few_through_and_closes_after_successes(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    assert not breaker.lets_through(0.5)
    now = breaker.opens_in(0.0)
    assert breaker.state(now) is State.HALF_OPEN
    probes = []
    while breaker.lets_through(now):
        probes.append(breaker.begin(now))
    assert probes == [True] * PROBES
    for _ in range(SUCCESSES):
        assert breaker.state(now) is State.HALF_OPEN
        breaker.succeeded(now, probe=True)
    assert breaker.state(now) is State.CLOSED


def test_a_probe_that_says_nothing_gives_its_place_back(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    now = breaker.opens_in(0.0)
    for _ in range(5 * PROBES):
        assert breaker.lets_through(now)
        breaker.dropped(probe=breaker.begin(now))


def test_openings_double_up_to_a_limit_and_are_forgotten_when_it_goes_well(breaker: Breaker) -> None:
    now, lengths = 0.0, []
    fail(breaker, FAILURES_IN_A_ROW, now)
    for _ in range(10):
        lengths.append(breaker.opens_in(now))
        now += lengths[-1]
        breaker.failed(now, "x", probe=breaker.begin(now))
    assert lengths[:4] == [1.0, 2.0, 4.0, 8.0]
    assert lengths[-1] == OPEN_CAP_S
    now += OPEN_CAP_S
    for _ in range(SUCCESSES):
        breaker.succeeded(now, probe=breaker.begin(now))
    fail(breaker, FAILURES_IN_A_ROW, now + 1)
    assert breaker.opens_in(now + 1) == OPEN_CAP_S  # it has only just come back
    now += 1 + OPEN_CAP_S
    for _ in range(SUCCESSES):
        breaker.succeeded(now, probe=breaker.begin(now))
    fail(breaker, FAILURES_IN_A_ROW, now + 1000)
    assert breaker.opens_in(now + 1000) == 1.0


def test_a_last_node_is_tried_by_one_leg_at_a_time_though_it_is_open(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    assert breaker.might_probe(0.1)
    assert breaker.begin(0.1)
    assert not breaker.might_probe(0.1)
    breaker.failed(0.2, "x", probe=True)
    assert breaker.opens_in(0.2) == pytest.approx(0.8)  # what was tried early does not prolong it
    for _ in range(SUCCESSES):
        breaker.succeeded(0.3, probe=breaker.begin(0.3))
    assert breaker.state(0.3) is State.CLOSED


def test_legs_sent_before_the_opening_change_nothing_later(breaker: Breaker) -> None:
    fail(breaker, FAILURES_IN_A_ROW, 0.0)
    breaker.succeeded(0.1, probe=False)
    breaker.failed(0.1, "late", probe=False)
    assert (breaker.state(0.1), breaker.opens_in(0.0)) == (State.OPEN, 1.0)
    breaker.state(1.0)
    breaker.failed(1.0, "late", probe=False)
    assert breaker.state(1.0) is State.HALF_OPEN


def test_rest_is_as_long_as_the_node_says(breaker: Breaker) -> None:
    breaker.rest(7.0, 1.0)
    assert (breaker.rests(7.9), breaker.rests(8.0), breaker.lets_through(2.0)) == (True, False, True)


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "good", "bad", "drop", "wait"]), st.floats(0, 40))),
    st.integers(),
)
def test_whatever_happens_probes_are_few_and_openings_bounded(events: list[tuple[str, float]], seed: int) -> None:
    breaker, now, legs = Breaker(random.Random(seed)), 0.0, list[bool]()
    for what, seconds in events:
        if what == "begin" and breaker.lets_through(now):
            legs.append(breaker.begin(now))
        elif what == "wait":
            now += seconds
        elif legs:
            probe = legs.pop(0)
            if what == "good":
                breaker.succeeded(now, probe=probe)
            elif what == "bad":
                breaker.failed(now, "x", probe=probe)
            else:
                breaker.dropped(probe=probe)
        breaker.check()
        assert sum(legs) <= PROBES
        assert (breaker.state(now) is State.OPEN) == (breaker.opens_in(now) > 0)
        if breaker.state(now) is State.OPEN:
            assert not breaker.lets_through(now)
    assert breaker.state(now + 300.0) is not State.OPEN  # whatever it was, it is tried again
