"""What the legs of one node tell its breakers, with times given by hand."""

import random

import pytest

from router.nodes.breaker import FAILURES_IN_A_ROW, SUCCESSES, State
from router.nodes.standing import Passage, Standing

NOW = 1.0


@pytest.fixture
def prefill() -> Standing:
    return Standing(random.Random(7))


@pytest.fixture
def decode() -> Standing:
    return Standing(random.Random(7))


def leg(prefill: Standing, decode: Standing, now: float = NOW, tokens: int = 0) -> Passage:
    """A decode leg that computes its prompt itself, after so many frames with tokens."""
    passage = Passage(prefill, decode, now)
    for _ in range(tokens):
        passage.heard(now, tokens=True)
    return passage


def opened(prefill: Standing, decode: Standing, tokens: int) -> Standing:
    """The standing whose breaker opens when legs break after so many tokens."""
    for _ in range(FAILURES_IN_A_ROW):
        leg(prefill, decode, tokens=tokens).failed("it broke", NOW)
    (found,) = [each for each in (prefill, decode) if each.breaker.state(NOW) is State.OPEN]
    return found


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_leg_that_computes_its_prompt_speaks_for_both_kinds(tokens: int, prefill: Standing, decode: Standing) -> None:
    standing = opened(prefill, decode, tokens)
    assert standing is (decode if tokens else prefill)
    now = NOW + standing.breaker.opens_in(NOW)
    for at in range(SUCCESSES):
        assert standing.breaker.state(now) is State.HALF_OPEN
        passage = leg(prefill, decode, now, tokens=at)
        passage.ended(now)
        standing.breaker.check()
    assert standing.breaker.state(now) is State.CLOSED


def test_of_decoding_the_second_token_speaks_and_the_first_does_not(prefill: Standing, decode: Standing) -> None:
    now = NOW + opened(prefill, decode, tokens=1).breaker.opens_in(NOW)
    for tokens in (0, 1):
        for _ in range(2 * SUCCESSES):
            leg(prefill, decode, now, tokens).close()  # its client has gone
        assert decode.breaker.state(now) is State.HALF_OPEN
        assert decode.breaker.lets_through(now)
    for _ in range(SUCCESSES):
        leg(prefill, decode, now, tokens=2).close()
    assert decode.breaker.state(now) is State.CLOSED


def test_failures_of_decoding_between_good_legs_are_none_in_a_row(prefill: Standing, decode: Standing) -> None:
    for at in range(4 * FAILURES_IN_A_ROW):
        passage = leg(prefill, decode, at * 100.0, tokens=1)
        if at % 2:
            passage.failed("it broke", at * 100.0)
        else:
            passage.ended(at * 100.0)
        assert decode.breaker.state(at * 100.0) is State.CLOSED
    assert prefill.breaker.state(0.0) is State.CLOSED


def test_what_breaks_before_its_first_token_gives_the_probe_of_decoding_back(
    prefill: Standing, decode: Standing
) -> None:
    now = NOW + opened(prefill, decode, tokens=1).breaker.opens_in(NOW)
    for _ in range(FAILURES_IN_A_ROW - 1):
        leg(prefill, decode, now).failed("it broke", now)
        assert decode.breaker.lets_through(now)
    assert decode.breaker.state(now) is State.HALF_OPEN
