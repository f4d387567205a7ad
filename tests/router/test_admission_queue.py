"""Who begins, who waits, who is refused: in front of a model of a cluster with so many seats."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.admission.keys import Refusal
from kvrelay.router.admission.queue import AdmissionQueue, QueuedRequest
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
                self.admission.correct(each, each.tokens)
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
    assert not len(cluster.admission)


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
    assert refusal(cluster.ask(queued(), 19)).reason == "key_queue_full"
    assert isinstance(cluster.ask(queued(key="b"), 19), Wait)


def test_requests_leave_the_queue_at_their_deadline_and_when_their_target_has_passed() -> None:
    cluster = ModelCluster(100)
    for _ in range(4):
        cluster.ask(queued())
    patient, hurried, gone = queued(deadline=2.5), queued(ttft_s=2.2), queued()
    for each in (patient, hurried, gone):
        assert isinstance(cluster.ask(each), Wait)
    cluster.admission.remove(gone)
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


# --- the order in which requests begin

KEYS = ("a", "b", "c")
sizes = st.integers(1, 1000)


def request(
    key: str = "a", tokens: int = 100, weight: float = 1.0, priority: int = 0, arrived: float = 0.0
) -> QueuedRequest:
    return QueuedRequest(key, arrived, weight, priority, tokens=tokens)


class Queue:
    """A queue in which all wait until `begin_next` or `begin`."""

    def __init__(self, max_queue: int = 1000) -> None:
        self.room = False
        self.admission: AdmissionQueue[QueuedRequest, str] = AdmissionQueue(
            max_queue, lambda _: "a seat" if self.room else Wait("no room")
        )

    def push(self, request: QueuedRequest) -> str | Wait | Refusal:
        return self.admission.arrive(request)

    def begin(self, request: QueuedRequest) -> None:
        self.room = True
        assert self.push(request) == "a seat"
        self.room = False

    def begin_next(self) -> QueuedRequest:
        self.room = True
        begun, found = next(self.admission.leaving(0.0))
        assert found == "a seat"
        self.room = False
        return begun


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), sizes), min_size=2, max_size=60),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
)
def test_while_two_keys_wait_they_get_their_shares_within_one_request_of_each(
    asked: list[tuple[str, int]], weights: list[float]
) -> None:
    weight = dict(zip(KEYS, weights, strict=True))
    queue = Queue()
    for key, tokens in asked:
        queue.push(request(key, tokens, weight[key]))
    got = dict.fromkeys(KEYS, 0.0)
    largest = {
        key: max((tokens for name, tokens in asked if name == key), default=0) for key in KEYS
    }
    while len(queue.admission):
        both = [key for key in KEYS if queue.admission.waiting(key)]
        for one, other in itertools.combinations(both, 2):
            apart = abs(got[one] / weight[one] - got[other] / weight[other])
            assert apart <= largest[one] / weight[one] + largest[other] / weight[other] + 1e-6
        first = queue.begin_next()
        got[first.key] += first.tokens
    assert got == {key: sum(tokens for name, tokens in asked if name == key) for key in KEYS}


def test_a_key_that_was_busy_for_long_does_not_keep_a_new_one_waiting_nor_the_other_way_round() -> (
    None
):
    queue = Queue()
    for _ in range(50):
        queue.push(request("heavy"))
    for _ in range(20):
        queue.begin_next()
    queue.push(request("light"))
    assert queue.begin_next().key == "light"
    # Having been idle saves nothing up: from now on they take turns.
    for _ in range(10):
        queue.push(request("light"))
    turns = [queue.begin_next().key for _ in range(10)]
    assert 4 <= turns.count("light") <= 6


def test_what_begins_without_waiting_counts_too() -> None:
    queue = Queue()
    queue.begin(request("heavy", 1000))
    queue.push(request("heavy", 10))
    queue.push(request("light", 10))
    assert [queue.begin_next().key for _ in range(2)] == ["light", "heavy"]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-3, 3), sizes), max_size=40))
def test_the_more_important_begin_first_and_of_a_key_the_older(
    asked: list[tuple[str, int, int]],
) -> None:
    queue = Queue()
    for at, (key, priority, tokens) in enumerate(asked):
        queue.push(request(key, tokens, priority=priority, arrived=float(at)))
    begun = [queue.begin_next() for _ in asked]
    assert not len(queue.admission)
    assert [each.priority for each in begun] == sorted(each.priority for each in begun)
    for key in KEYS:
        mine = [(each.priority, each.arrived) for each in begun if each.key == key]
        assert mine == sorted(mine)


def test_an_answer_shorter_than_thought_is_paid_back_and_a_longer_one_paid() -> None:
    queue = Queue()
    short, long = request("short", 1000), request("long", 10)
    queue.begin(short)
    queue.begin(long)
    queue.admission.correct(short, 10)
    queue.admission.correct(long, 5000)
    for key in ("long", "short", "short"):
        queue.push(request(key, 100))
    assert [queue.begin_next().key for _ in range(3)] == ["short", "short", "long"]
