"""Who begins, who waits, who is refused: in front of a model of a cluster with so many seats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.admission import Admission, Arrival, Refusal
from router.admission.fair_queue import Entrant
from router.placement import Refuse, Wait

TAKES_S = 1.0


class ModelCluster:
    """Seats that a request takes for a second; a router's admission in front of them."""

    def __init__(self, max_queue: int, seats: int = 1) -> None:
        self.admission, self.now, self.seats = Admission(max_queue), 0.0, seats
        self.running: list[tuple[Entrant, float]] = []
        self.begun: list[Entrant] = []
        self.refused: list[tuple[Entrant, Refusal]] = []

    def look(self, entrant: Entrant) -> str | Wait | Refuse:
        soonest = 0.0 if len(self.running) < self.seats else min(ends for _, ends in self.running) - self.now
        if entrant.ttft_s is not None and soonest + TAKES_S > entrant.ttft_s:
            return Refuse("ttft", (soonest + TAKES_S) * 1e3, entrant.ttft_s * 1e3, never=entrant.ttft_s < TAKES_S)
        return Wait("all seats are taken") if soonest else "a seat"

    def ask(self, entrant: Entrant, max_of_key: int = 0) -> Arrival[str]:
        arrival = self.admission.arrive(entrant, self.look, max_of_key)
        if arrival.begins:
            assert arrival.place == "a seat"
            self._begin(entrant)
        return arrival

    def run(self, seconds: float, tick: float = 0.05) -> None:
        for _ in range(max(1, math.ceil(seconds / tick - 1e-9))):
            self.now += tick
            for each, _ in [item for item in self.running if item[1] <= self.now]:
                self.running = [item for item in self.running if item[0] is not each]
                self.admission.ended(each, each.tokens)
            self.refused += self.admission.late(self.now)
            while (found := self.admission.next(self.look, self.now)) is not None:
                self._begin(found[0])

    def _begin(self, entrant: Entrant) -> None:
        self.begun.append(entrant)
        self.running.append((entrant, self.now + TAKES_S))


def entrant(tokens: int = 100, key: str = "a", **fields: float) -> Entrant:
    return Entrant(key, fields.pop("arrived", 0.0), tokens=tokens, **fields)  # type: ignore[arg-type]


def refusal(arrival: Arrival[str]) -> Refusal:
    assert arrival.refusal is not None
    return arrival.refusal


def test_whoever_finds_a_place_begins_at_once() -> None:
    cluster = ModelCluster(0, seats=50)
    assert [cluster.ask(entrant()).begins for _ in range(50)] == [True] * 50


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3))
def test_nobody_waits_for_ever_and_all_begin_in_order(count: int, seats: int) -> None:
    cluster = ModelCluster(100, seats)
    asked = [entrant() for _ in range(count)]
    for each in asked:
        cluster.ask(each)
    cluster.run(TAKES_S * (count / seats + 2))
    assert cluster.begun == asked
    assert not cluster.refused
    assert not cluster.admission.queue


def test_whoever_finds_the_queue_full_is_told_how_long_it_takes() -> None:
    cluster = ModelCluster(20)
    for _ in range(21):
        cluster.ask(entrant())
    assert refusal(cluster.ask(entrant())).reason == "queue_full"
    for _ in range(40):  # as fast as they end, so that it is known how fast that is
        cluster.run(1)
        cluster.ask(entrant(arrived=cluster.now))
    full = refusal(cluster.ask(entrant()))
    assert full.reason == "queue_full"
    assert full.retry_after_s == pytest.approx(20 * TAKES_S, rel=0.1)
    cluster.run(full.retry_after_s + 2)
    assert not cluster.admission.queue


def test_a_target_that_would_be_missed_is_refused_with_the_time_after_which_it_is_kept() -> None:
    cluster = ModelCluster(100)
    assert cluster.ask(entrant(ttft_s=1.5)).begins
    never = refusal(cluster.ask(entrant(ttft_s=0.5)))
    assert (never.reason, never.retry_after_s) == ("ttft_never", None)
    late = refusal(cluster.ask(entrant(ttft_s=1.5)))
    assert (late.reason, late.retry_after_s) == ("ttft", pytest.approx(0.5))
    assert "1500 ms" in late.message
    cluster.run(0.5)
    waits = entrant(ttft_s=1.6, arrived=cluster.now)
    assert cluster.ask(waits).refusal is None
    cluster.run(0.5)
    assert waits in cluster.begun


def test_a_token_that_takes_too_long_anywhere_is_refused_for_good() -> None:
    arrival = Admission(1).arrive(entrant(), lambda _: Refuse("tpot", 12.0, 10.0, never=True))
    assert (refusal(arrival).reason, refusal(arrival).retry_after_s) == ("tpot_never", None)
    assert "12.0 ms" in refusal(arrival).message


def test_a_full_queue_makes_room_for_the_more_important() -> None:
    cluster = ModelCluster(3)
    while not (arrival := cluster.ask(entrant(1000))).refusal:
        pass
    assert refusal(arrival).reason == "queue_full"
    arrival = cluster.ask(urgent := entrant(1000, priority=-1))
    assert arrival.displaced is not None
    assert arrival.displacement is not None
    assert arrival.displacement.reason == "displaced"
    assert arrival.displaced not in cluster.admission.queue
    assert cluster.admission.queue.first() is urgent


def test_the_places_of_one_key_are_bounded() -> None:
    cluster = ModelCluster(100)
    for _ in range(20):
        cluster.ask(entrant(1000))
    waiting = cluster.admission.queue.waiting("a")
    assert refusal(cluster.ask(entrant(), waiting)).reason == "key_queue_full"
    assert cluster.ask(entrant(key="b"), waiting).refusal is None


def test_requests_leave_the_queue_at_their_deadline_and_when_their_target_has_passed() -> None:
    cluster = ModelCluster(100)
    for _ in range(4):
        cluster.ask(entrant())
    patient, hurried, gone = entrant(deadline=2.5), entrant(ttft_s=2.2), entrant()
    for each in (patient, hurried, gone):
        assert cluster.ask(each).refusal is None
    cluster.admission.leave(gone)
    cluster.run(4)
    assert {each: why.reason for each, why in cluster.refused} == {patient: "deadline", hurried: "ttft_passed"}
    assert gone not in cluster.begun


def test_a_first_that_no_cluster_can_serve_any_more_leaves_the_queue() -> None:
    """As when nodes have become slower than its target since it came."""
    cluster = ModelCluster(100)
    cluster.ask(entrant())
    for each in (hopeless := entrant(), behind := entrant()):
        assert not cluster.ask(each).begins

    def look(entrant: Entrant) -> str | Wait | Refuse:
        return Refuse("tpot", 9.0, 8.0, never=True) if entrant is hopeless else "a seat"

    found = cluster.admission.next(look, 1.0)
    assert found is not None
    assert (found[0], isinstance(found[1], Refusal)) == (hopeless, True)
    assert cluster.admission.next(look, 1.0) == (behind, "a seat")
