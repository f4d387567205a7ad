"""Who begins, who waits, who is refused: in front of a model of a cluster with so many seats."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.admission.keys import Refusal
from kvrelay.router.admission.queue import AdmissionQueue, QueuedRequest
from kvrelay.router.placement import Refuse, Wait

Found = str | Wait | Refuse


class Queue:
    """A queue in which all wait until `begin_next` or `begin`, or are told what `found` says."""

    def __init__(self, max_queue: int = 1000) -> None:
        self.found: Callable[[QueuedRequest], Found] = lambda _: Wait("no room")
        self.admission: AdmissionQueue[QueuedRequest, str] = AdmissionQueue(
            max_queue, lambda request: self.found(request)
        )

    def push(self, request: QueuedRequest, max_of_key: int = 0) -> str | Wait | Refusal:
        return self.admission.arrive(request, max_of_key)

    def begin(self, request: QueuedRequest) -> None:
        self.found, before = lambda _: "a seat", self.found
        assert self.push(request) == "a seat"
        self.found = before

    def begin_next(self, now: float = 0.0) -> QueuedRequest:
        self.found, before = lambda _: "a seat", self.found
        begun, found = next(self.admission.leaving(now))
        assert found == "a seat"
        self.found = before
        return begun


def request(
    key: str = "a",
    tokens: int = 100,
    weight: float = 1.0,
    priority: int = 0,
    arrived: float = 0.0,
    **limits: float,
) -> QueuedRequest:
    return QueuedRequest(key, arrived, weight, priority, tokens, **limits)


def refusal(found: object) -> Refusal:
    assert isinstance(found, Refusal)
    return found


def test_whoever_finds_the_queue_full_is_told_how_long_the_last_one_waited() -> None:
    queue = Queue(2)
    for _ in range(3):
        full = queue.push(request())
    assert (refusal(full).reason, refusal(full).retry_after_s) == ("queue_full", 0.0)
    queue.begin_next(now=7.0)
    assert isinstance(queue.push(request()), Wait)
    assert refusal(queue.push(request())).retry_after_s == 7.0


def test_a_target_that_would_be_missed_is_refused_with_the_time_after_which_it_is_kept() -> None:
    queue = Queue()
    queue.found = lambda _: Refuse("ttft", 2_000.0, 1_500.0)
    late = refusal(queue.push(request()))
    assert (late.reason, late.retry_after_s) == ("ttft", 0.5)
    assert "1500 ms" in late.message
    queue.found = lambda _: Refuse("ttft", 2_000.0, 1_500.0, never=True)
    never = refusal(queue.push(request()))
    assert (never.reason, never.retry_after_s) == ("ttft_never", None)


def test_the_places_of_one_key_are_bounded() -> None:
    queue = Queue()
    for _ in range(3):
        assert isinstance(queue.push(request(), 3), Wait)
    assert refusal(queue.push(request(), 3)).reason == "key_queue_full"
    assert isinstance(queue.push(request("b"), 3), Wait)


def test_requests_leave_the_queue_at_their_deadline_and_when_their_target_has_passed() -> None:
    queue, gone = Queue(), request(deadline=1.0)
    patient, hurried = request(deadline=2.5), request(ttft_s=2.2)
    for each in (patient, hurried, gone):
        assert isinstance(queue.push(each), Wait)
    assert (queue.admission.remove(gone), queue.admission.remove(gone)) == (True, False)
    left = {
        now: [(each, refusal(why).reason) for each, why in queue.admission.leaving(now)]
        for now in (2.1, 2.3, 2.6)
    }
    assert left == {2.1: [], 2.3: [(hurried, "ttft_passed")], 2.6: [(patient, "deadline")]}


@pytest.mark.parametrize(
    ("why", "reason"),
    [(Refuse("tpot", 9.0, 8.0, never=True), "tpot_never"), (Refuse("ttft", 9.0, 8.0), "ttft")],
)
def test_a_first_that_would_miss_a_target_leaves_and_keeps_nobody_waiting(
    why: Refuse, reason: str
) -> None:
    queue, late, other = Queue(), request(), request()
    queue.push(late)
    queue.push(other)
    queue.found = lambda each: why if each is late else "a seat"
    (first, found), *rest = queue.admission.leaving(1.0)
    assert (first, refusal(found).reason, rest) == (late, reason, [(other, "a seat")])


# --- the order in which requests begin

KEYS = ("a", "b", "c")
sizes = st.integers(1, 1000)


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


def test_a_key_whose_request_cost_less_than_thought_is_not_ahead_of_all_others() -> None:
    queue, dear = Queue(), request("a", 1000)
    queue.begin(dear)
    for _ in range(3):
        queue.begin(request("b", 400))
    waiting = [request("a", 100), request("a", 500), request("b"), request("a")]
    for each in waiting:
        queue.push(each)
    queue.admission.correct(dear, 0)
    assert [queue.begin_next() for _ in waiting] == waiting
