"""When KV of another node's cache is worth its way."""

from __future__ import annotations

from kvrelay.node.pulls import PullPrice
from kvrelay.wire.step_costs import StepCosts

COSTS = StepCosts(5.0, 0.5, 0.0, 0.0, 0.1, 0.0)
SIZE = 10**6


def worth_ms(price: PullPrice, tokens: int = 400, now: float = 0.0) -> float:
    return price.worth_ms(tokens, 0, SIZE, COSTS, now)


def test_computing_must_take_longer_than_a_pull_and_is_its_limit() -> None:
    price = PullPrice()
    assert worth_ms(price) == 40.0
    assert worth_ms(price, 16) == 0.0
    assert price.worth_ms(400, 0, SIZE, None, 0.0) == 0.0


def test_a_first_contact_decides_nothing_and_a_slow_link_is_tried_again_in_a_minute() -> None:
    price = PullPrice()
    price.read(SIZE, 5000.0, now=0.0)
    assert worth_ms(price) == 40.0
    price.read(SIZE, 500.0, now=1.0)
    assert worth_ms(price, now=1.0) == 0.0
    assert worth_ms(price, now=60.5) == 40.0


def test_slow_answers_count_too() -> None:
    price = PullPrice()
    for _ in range(3):
        price.asked(50.0, now=0.0)
    assert worth_ms(price) == 0.0
    assert worth_ms(price, 600) == 60.0
    price.read(0, 1.0, now=0.0)  # all was cached meanwhile
    assert price.pull_ms(0, 0.0) == 50.0
