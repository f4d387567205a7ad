"""Rates learned from measurements: what a node's curves say after which news."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.nodes.rates import Curve, NodeRates

measured = st.lists(st.tuples(st.integers(1, 200_000), st.floats(0.01, 1e6)), max_size=60)


@given(measured, st.lists(st.integers(0, 1 << 28), min_size=2, max_size=20))
@settings(max_examples=60)
def test_a_curve_never_falls_whatever_was_measured(news: list[tuple[int, float]], sizes: list[int]) -> None:
    fleet = Curve(5.0, 0.04, 2)
    curve = Curve(5.0, 0.04, 2, fleet)
    for at, (size, ms) in enumerate(news):
        (curve if at % 3 else fleet).measure(size, ms)
    heights = [curve.at(size) for size in sorted(sizes)]
    assert heights == sorted(heights)
    assert all(math.isfinite(ms) and ms >= 0 for ms in heights)
    assert curve.at(0) == 0.0


@given(st.floats(0.02, 50), st.floats(0, 0.4), st.integers(0, 99))
@settings(max_examples=30)
def test_estimates_come_near_what_is_measured(factor: float, noise: float, seed: int) -> None:
    """Times that grow with the length squared, as attention does, on a machine of any speed."""

    def truth(tokens: int) -> float:
        return factor * (10 + 0.05 * tokens + 2e-6 * tokens**2)

    rng, rates = random.Random(seed), NodeRates()
    for _ in range(300):
        tokens = int(2 ** rng.uniform(4, 15))
        rates.prefilled(tokens, truth(tokens) * rng.uniform(1 - noise, 1 + noise))
    for tokens in (30, 100, 1_000, 5_000, 30_000):
        assert 0.6 < rates.prefill_ms(tokens) / truth(tokens) < 1.6


def test_a_few_measurements_at_one_length_speak_for_all_lengths() -> None:
    rates, usual = NodeRates(), NodeRates()
    for _ in range(10):
        rates.prefilled(300, 30 * usual.prefill_ms(300))
    assert 15 < rates.prefill_ms(8_000) / usual.prefill_ms(8_000) < 31


def test_an_outlier_moves_an_estimate_by_a_bounded_factor_and_a_change_gets_through() -> None:
    rates = NodeRates()
    for _ in range(20):
        rates.stepped(8, 10.0)
    rates.stepped(8, 60_000.0)
    assert rates.step_ms(8) < 15
    for _ in range(30):
        rates.stepped(8, 100.0)
    assert 80 < rates.step_ms(8) < 110


def test_prompts_that_share_steps_with_long_ones_do_not_seem_to_take_as_long_as_they() -> None:
    rng, rates = random.Random(5), NodeRates()
    for _ in range(400):
        tokens, beside = int(2 ** rng.uniform(7, 14)), rng.choice([0, 0, 8_000])
        rates.prefilled(tokens, 0.02 * (tokens + beside), shared=True)
    for tokens in (300, 1_000, 10_000):
        assert 0.7 < rates.prefill_ms(tokens) / (0.02 * tokens) < 2.0
    # And one that has become slow is found out all the same.
    for _ in range(400):
        tokens = int(2 ** rng.uniform(7, 14))
        rates.prefilled(tokens, 0.1 * tokens, shared=True)
    assert rates.prefill_ms(1_000) > 60


def test_a_node_that_was_not_measured_is_as_its_fleet_and_then_as_itself() -> None:
    fleet = NodeRates()
    known, new = NodeRates(fleet), NodeRates(fleet)
    for _ in range(20):
        known.stepped(16, 50.0)
    assert 40 < new.step_ms(16) < 55
    for _ in range(10):
        new.stepped(16, 100.0)
    assert 80 < new.step_ms(16) < 105
    assert 45 < known.step_ms(16) < 60


def test_a_node_that_was_slow_once_is_tried_again() -> None:
    fleet = NodeRates()
    usual, slow = NodeRates(fleet), NodeRates(fleet)
    for _ in range(10):
        slow.prefilled(1_000, 5_000.0)
    for _ in range(40):
        usual.prefilled(1_000, 50.0)
    slow.age(0.0)
    assert slow.prefill_ms(1_000) > 2_000
    for minute in range(1, 15):
        slow.age(60.0 * minute)
    assert slow.prefill_ms(1_000) < 200


def _size_at(rates: NodeRates, step_ms: float) -> int:
    return next(size for size in range(1, 300) if rates.step_ms(size) >= step_ms)


def test_who_is_computed_is_half_done() -> None:
    rates = NodeRates()
    each_ms, least_ms = rates.prompts_ms(1_000), rates.prefill_ms(1)
    assert rates.queue_ms(1_000, 1) == pytest.approx(each_ms / 2 + least_ms)
    assert rates.queue_ms(2_000, 2) == pytest.approx(1.5 * each_ms + 2 * least_ms)
    assert rates.queue_ms(0, 2) == pytest.approx(2 * least_ms)


def test_what_was_not_measured_is_no_reason_to_refuse() -> None:
    """Twice as many requests take half as long again on this GPU, and nearly twice as long by the guess."""
    fleet = NodeRates()
    rates = NodeRates(fleet)
    assert (rates.sure_step_ms(200), rates.sure_prefill_ms(4_000)) == (0.0, 0.0)
    for _ in range(5):
        rates.stepped(80, 8.0)
        rates.prefilled(500, 12.0)
    assert rates.step_ms(240) > 15
    assert rates.sure_step_ms(240) == rates.step_ms(80) < 9
    assert rates.sure_step_ms(80) == rates.step_ms(80)
    assert rates.sure_prefill_ms(100_000) == rates.prefill_ms(500)
    assert NodeRates(fleet).sure_step_ms(240) == fleet.sure_step_ms(240) > 0  # of nodes like it
    for _ in range(5):
        rates.stepped(240, 12.0)
    assert rates.sure_step_ms(240) == rates.step_ms(240) < 14
    for _ in range(40):
        rates.stepped(130, 9.0)
    assert 130 * 0.95 < _size_at(rates, rates.sure_step_ms(255)) < 140  # that there were 240 is long ago
    for minute in range(30):
        rates.age(60.0 * minute)
    assert 0 < rates.sure_step_ms(240) < 14  # in the fleet it was faster than guessed, which is not forgotten


def test_short_prompts_do_not_make_long_ones_uncertain() -> None:
    rates = NodeRates()
    for at in range(200):
        tokens = 4_000 if at % 20 == 0 else 1_100
        rates.prefilled(tokens, tokens / 40)
    assert rates.sure_prefill_ms(4_000) == rates.prefill_ms(4_000) == pytest.approx(100, rel=0.2)
    assert rates.sure_prefill_ms(16_000) == rates.prefill_ms(4_000)


def test_pairs_are_told_apart_and_forgotten_pairs_are_few() -> None:
    rates = NodeRates()
    for _ in range(20):
        rates.fetched("near", 4_000, 3.0)
        rates.fetched("far", 4_000, 300.0)
    assert rates.transfer_ms("near", 4_000) < rates.transfer_ms("", 4_000) < rates.transfer_ms("far", 4_000)
    assert rates.transfer_ms("far", 4_000) > 40 * rates.transfer_ms("near", 4_000)
    for at in range(1_000):
        rates.fetched(f"p{at}", 100, 1.0)
    assert len(rates._peers) == 256


def test_the_queue_is_corrected_by_what_was_waited() -> None:
    rates = NodeRates()
    first = rates.queue_ms(5_000, 3)
    for _ in range(60):
        rates.waited(rates.queue_ms(5_000, 3), 3 * first)
    assert 2.5 < rates.queue_ms(5_000, 3) / first < 3.5
    for _ in range(60):
        rates.waited(0.0, 1e9)  # nothing was expected: says nothing of speed
    assert rates.queue_ms(5_000, 3) < 3.5 * first


def test_answers_are_as_long_as_they_were_of_late_and_never_longer_than_allowed() -> None:
    fleet = NodeRates()
    rates = NodeRates(fleet)
    for _ in range(100):
        NodeRates(fleet).generated(1_000)
    assert 950 < rates.output_tokens() <= 1_000
    assert rates.output_tokens(16) == 16


def test_nonsense_says_nothing() -> None:
    rates, usual = NodeRates(), NodeRates()
    for tokens, ms in ((0, 5.0), (-7, 5.0), (10, 0.0), (10, -1.0)):
        rates.prefilled(tokens, ms)
        rates.fetched("p", tokens, ms)
    assert rates.prefill_ms(100) == usual.prefill_ms(100)
    assert rates.transfer_ms("p", 100) == usual.transfer_ms("p", 100)
