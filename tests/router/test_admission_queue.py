"""Who begins, who waits, who is refused: in front of a model of a cluster with so many seats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.admission.admission_queue import AdmissionQueue
from kvrelay.router.admission.fair_queue import QueuedRequest
from kvrelay.router.admission.rate_limits import Refusal
from kvrelay.router.placement import Refuse, Wait

TAKES_S = 1.0


class ModelCluster:
    """Seats that a request takes for a second; a router's admission in front of them."""

    def __init__(self, max_queue: int, seats: int = 1) -> None:
        self.admission: AdmissionQueue[QueuedRequest, str] = AdmissionQueue(
            max_queue, lambda request: self.look(request)
        )
        self.now, self.seats = 0.0, seats
        self.running: list[tuple[QueuedRequest, float]] = []
        self.begun: list[QueuedRequest] = []
        self.refused: list[tuple[QueuedRequest, Refusal]] = []

    def look(self, request: QueuedRequest) -> str | Wait | Refuse:
        soonest = (
            0.0
            if len(self.running) < self.seats
            else min(ends for _, ends in self.running) - self.now
        )
        if request.ttft_s is not None and soonest + TAKES_S > request.ttft_s:
            return Refuse(
                "ttft",
                (soonest + TAKES_S) * 1e3,
                request.ttft_s * 1e3,
                never=request.ttft_s < TAKES_S,
            )
        return Wait("all seats are taken") if soonest else "a seat"

    def ask(self, request: QueuedRequest, max_of_key: int = 0) -> str | Wait | Refusal:
        found = self.admission.arrive(request, max_of_key)
        if not isinstance(found, Wait | Refusal):
            assert found == "a seat"
            self._begin(request)
        return found

    def run(self, seconds: float, tick: float = 0.05) -> None:
        for _ in range(max(1, math.ceil(seconds / tick - 1e-9))):
            self.now += tick
            for each, _ in [item for item in self.running if item[1] <= self.now]:
                self.running = [item for item in self.running if item[0] is not each]
                self.admission.queue.correct(each, each.tokens)
            for each, found in self.admission.leaving(self.now):
                if isinstance(found, Refusal):
                    self.refused.append((each, found))
                else:
                    assert found == "a seat"
                    self._begin(each)

    def _begin(self, request: QueuedRequest) -> None:
        self.begun.append(request)
        self.running.append((request, self.now + TAKES_S))


def queued(tokens: int = 100, key: str = "a", **fields: float) -> QueuedRequest:
    return QueuedRequest(key, fields.pop("arrived", 0.0), tokens=tokens, **fields)  # type: ignore[arg-type]


def refusal(found: object) -> Refusal:
    assert isinstance(found, Refusal)
    return found


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3))
def test_nobody_waits_for_ever_and_all_begin_in_order(count: int, seats: int) -> None:
    cluster = ModelCluster(100, seats)
    asked = [queued() for _ in range(count)]
    for each in asked:
        cluster.ask(each)
    cluster.run(TAKES_S * (count / seats + 2))
    assert cluster.begun == asked
    assert not cluster.refused
    assert not cluster.admission.queue


def test_whoever_finds_the_queue_full_is_told_how_long_it_takes() -> None:
    cluster = ModelCluster(20)
    for _ in range(21):
        cluster.ask(queued())
    assert refusal(cluster.ask(queued())).reason == "queue_full"
    for _ in range(40):  # as fast as they end, so that it is known how fast that is
        cluster.run(1)
        cluster.ask(queued(arrived=cluster.now))
    full = refusal(cluster.ask(queued()))
    assert full.reason == "queue_full"
    assert full.retry_after_s == pytest.approx(20 * TAKES_S, rel=0.1)
    cluster.run(full.retry_after_s + 2)
    assert not cluster.admission.queue


def test_a_target_that_would_be_missed_is_refused_with_the_time_after_which_it_is_kept() -> None:
    cluster = ModelCluster(100)
    assert cluster.ask(queued(ttft_s=1.5)) == "a seat"
    never = refusal(cluster.ask(queued(ttft_s=0.5)))
    assert (never.reason, never.retry_after_s) == ("ttft_never", None)
    late = refusal(cluster.ask(queued(ttft_s=1.5)))
    assert (late.reason, late.retry_after_s) == ("ttft", pytest.approx(0.5))
    assert "1500 ms" in late.message
    cluster.run(0.5)
    waits = queued(ttft_s=1.6, arrived=cluster.now)
    assert isinstance(cluster.ask(waits), Wait)
    cluster.run(0.5)
    assert waits in cluster.begun


def test_the_places_of_one_key_are_bounded() -> None:
    cluster = ModelCluster(100)
    for _ in range(20):
        cluster.ask(queued(1000))
    waiting = cluster.admission.queue.waiting("a")
    assert refusal(cluster.ask(queued(), waiting)).reason == "key_queue_full"
    assert isinstance(cluster.ask(queued(key="b"), waiting), Wait)


def test_requests_leave_the_queue_at_their_deadline_and_when_their_target_has_passed() -> None:
    cluster = ModelCluster(100)
    for _ in range(4):
        cluster.ask(queued())
    patient, hurried, gone = queued(deadline=2.5), queued(ttft_s=2.2), queued()
    for each in (patient, hurried, gone):
        assert isinstance(cluster.ask(each), Wait)
    cluster.admission.queue.remove(gone)
    cluster.run(4)
    assert {each: why.reason for each, why in cluster.refused} == {
        patient: "deadline",
        hurried: "ttft_passed",
    }
    assert gone not in cluster.begun


def test_a_first_that_no_cluster_can_serve_any_more_leaves_the_queue() -> None:
    """As when nodes have become slower than its target since it came."""
    cluster = ModelCluster(100)
    cluster.ask(queued())
    for each in (hopeless := queued(), behind := queued()):
        assert isinstance(cluster.ask(each), Wait)

    def look(request: QueuedRequest) -> str | Wait | Refuse:
        return Refuse("tpot", 9.0, 8.0, never=True) if request is hopeless else "a seat"

    cluster.look = look
    first, second = cluster.admission.leaving(1.0)
    assert (first[0], refusal(first[1]).reason) == (hopeless, "tpot_never")
    assert second == (behind, "a seat")
