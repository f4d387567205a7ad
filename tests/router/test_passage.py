"""What the legs of one node tell its breakers, with times given by hand."""

import random

import pytest

from kvrelay.router.nodes.breaker import FAILURES_IN_A_ROW, Breaker, BreakerCall, State, Verdict

NOW = 1.0


@pytest.fixture
def prefill() -> Breaker:
    return Breaker(random.Random(7))


@pytest.fixture
def decode() -> Breaker:
    return Breaker(random.Random(7))


def leg(prefill: Breaker, decode: Breaker, now: float = NOW, tokens: int = 0) -> BreakerCall:
    """A decode leg that computes its prompt itself, after so many frames with tokens."""
    passage = BreakerCall(prefill, decode, now)
    for _ in range(tokens):
        passage.heard(now, tokens=True)
    return passage


def opened(prefill: Breaker, decode: Breaker, tokens: int) -> Breaker:
    """The breaker that opens when legs break after so many tokens."""
    for _ in range(FAILURES_IN_A_ROW):
        leg(prefill, decode, tokens=tokens).failed("it broke", NOW)
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
    leg(prefill, decode, now, tokens=tokens).succeeded(now)
    assert breaker.state(now) is State.CLOSED


def test_of_decoding_the_second_token_speaks_and_the_first_does_not(
    prefill: Breaker, decode: Breaker
) -> None:
    now = NOW + opened(prefill, decode, tokens=1).opens_in(NOW)
    for tokens in (0, 1):
        for _ in range(4):
            leg(prefill, decode, now, tokens).close()  # its client has gone
        assert decode.state(now) is State.HALF_OPEN
        assert decode.verdict(now) is Verdict.TAKES
    leg(prefill, decode, now, tokens=2).close()
    assert decode.state(now) is State.CLOSED


def test_a_node_that_breaks_every_stream_is_found_out(decode: Breaker) -> None:
    assert opened(decode, decode, tokens=3) is decode
    now = NOW + decode.opens_in(NOW)
    leg(decode, decode, now, tokens=3).succeeded(now)
    assert decode.state(now) is State.CLOSED


def test_failures_of_decoding_between_good_legs_are_none_in_a_row(
    prefill: Breaker, decode: Breaker
) -> None:
    for at in range(4 * FAILURES_IN_A_ROW):
        passage = leg(prefill, decode, at * 100.0, tokens=1)
        if at % 2:
            passage.failed("it broke", at * 100.0)
        else:
            passage.succeeded(at * 100.0)
        assert decode.state(at * 100.0) is State.CLOSED
    assert prefill.state(0.0) is State.CLOSED


def test_what_breaks_before_its_first_token_gives_the_probe_of_decoding_back(
    prefill: Breaker, decode: Breaker
) -> None:
    now = NOW + opened(prefill, decode, tokens=1).opens_in(NOW)
    for _ in range(FAILURES_IN_A_ROW - 1):
        leg(prefill, decode, now).failed("it broke", now)
        assert decode.verdict(now) is Verdict.TAKES
    assert decode.state(now) is State.HALF_OPEN
