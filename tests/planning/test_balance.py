"""When a node changes its role: the busier role gets one, for a reason, and nothing flaps."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planning.balance import Balance, Balancing, Decision, Seen, enough
from wire.config import Role
from wire.errors import ConfigError


def looked(balance: Balance, prefill: Seen, decode: Seen, times: int, begins: float = 0.0) -> list[Decision]:
    return [balance.look(prefill, decode, begins + 5.0 * at) for at in range(times)]


def test_a_role_whose_nodes_are_taken_gets_one_of_the_others_after_three_looks() -> None:
    told = looked(Balance(Balancing()), Seen(1, 1.2, ended=10, met=5), Seen(3, 0.9, ended=10, met=10), 3)
    assert [each.role for each in told] == [None, None, Role.PREFILL]
    assert told[1].why == (
        "prefill has work for 120% of its 1 node and 50% of its requests in time, decode for 30% of 3 nodes and 100%: "
        "one more prefill node would leave 60%, seen 2 of 3 times"
    )
    assert told[2].why.endswith("one decode node becomes a prefill node, which leaves 60%")


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (Seen(2, 1.0, ended=9, met=9), Seen(2, 0.4, ended=9, met=9), "nobody is short of nodes"),
        (Seen(3, 2.9, ended=9, met=0), Seen(1, 0.1, ended=9, met=9), "decode keeps 1 node at least"),
        (Seen(2, 1.9, ended=9, met=0), Seen(2, 1.8, ended=9, met=0), "would leave 180%, which is not 10% less"),
        (Seen(2, 0.0), Seen(2, 0.0), "nothing was asked since the last look"),
        # Where next to nothing is done another node helps nobody.
        (Seen(2, 0.04, ended=9, met=0), Seen(2, 0.01, ended=9, met=9), "nobody is short of nodes"),
        (Seen(1, 1.9, ended=9, met=0), Seen(3, 0.1, known=False), "too few requests have ended to tell what decode"),
    ],
)
def test_all_stay_what_they_are_for_a_reason(prefill: Seen, decode: Seen, why: str) -> None:
    for told in looked(Balance(Balancing()), prefill, decode, 5):
        assert told.role is None
        assert why in told.why


def test_what_waits_is_reason_enough_however_little_was_asked_of_late() -> None:
    waiting = Seen(2, 0.04, backlog_s=9.0, ended=9, met=9)
    assert looked(Balance(Balancing()), waiting, Seen(2, 0.01), 3)[-1].role is Role.PREFILL


def test_a_router_that_is_asked_nothing_decides_nothing() -> None:
    """It drains: what it has seen fades, and its shares with it stay what they were."""
    balance = Balance(Balancing())
    looked(balance, Seen(2, 1.9, ended=9, met=0), Seen(6, 1.0, ended=9, met=9), 2)
    told = looked(balance, Seen(2, 0.0), Seen(6, 0.0), 9, 10.0)
    assert {(each.role, each.why) for each in told} == {(None, "nothing was asked since the last look")}


def test_work_counts_from_the_look_on_at_which_it_is_known() -> None:
    balance = Balance(Balancing())
    busy = Seen(1, 1.1, ended=9, met=0)
    assert {each.role for each in looked(balance, busy, Seen(3, 0.1, known=False), 8)} == {None}
    told = looked(balance, busy, Seen(3, 2.9), 4, 40.0)
    assert balance.figures(Role.DECODE).work == pytest.approx(2.9)
    assert {each.role for each in told} == {None}
    # Whoever is short though only a part of its work is known is short all the more.
    told = looked(Balance(Balancing()), Seen(3, 0.1), Seen(1, 1.1, known=False), 3)
    assert told[-1].role is Role.DECODE


def test_answers_tell_how_long_they_are_once_as_many_have_ended_as_are_under_way() -> None:
    assert [enough(*each) for each in ((4, 0), (5, 0), (9, 9), (9, 10))] == [False, True, True, False]


def test_there_is_no_way_back_from_a_change_that_has_not_come_about() -> None:
    busy, idle = Seen(2, 1.9, ended=9, met=0), Seen(6, 1.0, ended=9, met=9)
    back = Seen(3, 1.5, ended=9, met=9), Seen(5, 4.3, ended=9, met=0)
    for refused in (True, False):
        balance = Balance(Balancing())
        assert looked(balance, busy, idle, 3)[-1].role is Role.PREFILL
        if refused:
            balance.refused()
        told = looked(balance, *back, 20, 300.0)
        assert any(each.role is Role.DECODE for each in told) is refused
    balance = Balance(Balancing())
    balance.changed(Role.PREFILL, 0.0)
    balance.refused()  # that of another one was none of ours
    assert {each.role for each in looked(balance, *back, 20, 300.0)} == {None}


def test_a_change_rests_and_the_way_back_costs_twice_the_margin() -> None:
    balance = Balance(Balancing())
    busy, idle = Seen(2, 1.9, ended=9, met=0), Seen(6, 1.0, ended=9, met=9)
    assert looked(balance, busy, idle, 3)[-1].role is Role.PREFILL
    assert "is changing" in balance.look(busy, idle, 15.0, switching=True).why
    resting = looked(balance, Seen(3, 2.9, ended=9, met=0), Seen(5, 1.0, ended=9, met=9), 6, 20.0)
    assert {each.role for each in resting[:5]} == {None}
    assert "less than 30 s ago" in resting[0].why
    # Decode has become busier, but not by so much that the node should go back already.
    back = looked(balance, Seen(3, 1.5, ended=9, met=9), Seen(5, 4.3, ended=9, met=0), 20, 100.0)
    assert {each.role for each in back} == {None}
    assert "not 20% less, as the way back must be" in back[-1].why
    assert looked(balance, Seen(3, 1.5, ended=9, met=9), Seen(5, 4.3, ended=9, met=0), 20, 900.0)[-1].role is None
    told = looked(balance, Seen(3, 0.6, ended=9, met=9), Seen(5, 4.9, ended=9, met=0), 20, 4_000.0)
    assert Role.DECODE in {each.role for each in told}


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 16), st.floats(0.05, 0.95), st.floats(0.3, 0.95), st.floats(0.0, 0.4), st.integers(0, 1 << 20))
@example(16, 0.875, 0.75, 0.0, 1)  # one node more is less than the margin
@example(4, 0.34375, 0.75, 0.375, 0)
@example(4, 0.32421875, 0.75, 0.3125, 89)
def test_an_hour_of_steady_work_ends_near_the_best_ratio_without_flapping(
    nodes: int, share: float, load: float, noise: float, seed: int
) -> None:
    """A fluid model: `share` of the work is prefill's, of `load` of all nodes' time; each look sees it with noise."""
    rng, balance = random.Random(seed), Balance(Balancing())
    prefill, need = rng.randrange(1, nodes), (nodes * load * share, nodes * load * (1 - share))
    flips: list[tuple[float, Role]] = []
    switching_until = -1.0
    waiting = [0.0, 0.0]
    for look in range(720):
        now = look * 5.0
        seen = []
        for at, count in enumerate((prefill, nodes - prefill)):
            work = need[at] * rng.uniform(1 - noise, 1 + noise)
            waiting[at] = max(0.0, waiting[at] + (work - count) * 5)
            seen.append(Seen(count, work, waiting[at], 20, 20 if work / count < 0.9 and not waiting[at] else 8))
        told = balance.look(seen[0], seen[1], now, switching=now < switching_until)
        if told.role is not None:
            prefill += 1 if told.role is Role.PREFILL else -1
            flips.append((now, told.role))
            switching_until = now + 12
        assert 1 <= prefill < nodes
    assert sum(now > 1_800 for now, _ in flips) <= 1
    assert len(flips) <= nodes + 2

    def use(count: int) -> float:
        return max(need[0] / count, need[1] / (nodes - count))

    best = min(use(count) for count in range(1, nodes))
    assert use(prefill) <= max(best / (1 - 0.2) * 1.05, 0.9 / (1 - noise / 2))


@pytest.mark.parametrize(
    "values", [{"every_s": 0}, {"margin": 1.5}, {"attainment": 0}, {"least_prefill": 0}, {"least_decode": 0}]
)
def test_settings_that_cannot_be_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Balancing(**values)  # type: ignore[arg-type]
