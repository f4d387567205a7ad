"""The order in which requests begin: priority, then shares by weight; and who leaves when there is
no room.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.admission.fair_queue import FairQueue, QueuedRequest

KEYS = ("a", "b", "c")
sizes = st.integers(1, 1000)


def request(
    key: str = "a", tokens: int = 100, weight: float = 1.0, priority: int = 0, arrived: float = 0.0
) -> QueuedRequest:
    return QueuedRequest(key, arrived, weight, priority, tokens=tokens)


def begin_next(queue: FairQueue[QueuedRequest]) -> QueuedRequest:
    first = queue.first()
    assert first is not None
    queue.begin(first)
    return first


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), sizes), min_size=2, max_size=60),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
)
def test_while_two_keys_wait_they_get_their_shares_within_one_request_of_each(
    asked: list[tuple[str, int]], weights: list[float]
) -> None:
    weight = dict(zip(KEYS, weights, strict=True))
    queue: FairQueue[QueuedRequest] = FairQueue()
    for key, tokens in asked:
        queue.push(request(key, tokens, weight[key]))
    got = dict.fromkeys(KEYS, 0.0)
    largest = {
        key: max((tokens for name, tokens in asked if name == key), default=0) for key in KEYS
    }
    while len(queue):
        both = [key for key in KEYS if queue.waiting(key)]
        for one, other in itertools.combinations(both, 2):
            apart = abs(got[one] / weight[one] - got[other] / weight[other])
            assert apart <= largest[one] / weight[one] + largest[other] / weight[other] + 1e-6
        first = begin_next(queue)
        got[first.key] += first.tokens
    assert got == {key: sum(tokens for name, tokens in asked if name == key) for key in KEYS}


def test_a_key_that_was_busy_for_long_does_not_keep_a_new_one_waiting_nor_the_other_way_round() -> (
    None
):
    queue: FairQueue[QueuedRequest] = FairQueue()
    for _ in range(50):
        queue.push(request("heavy"))
    for _ in range(20):
        begin_next(queue)
    queue.push(request("light"))
    assert begin_next(queue).key == "light"
    # Having been idle saves nothing up: from now on they take turns.
    for _ in range(10):
        queue.push(request("light"))
    turns = [begin_next(queue).key for _ in range(10)]
    assert 4 <= turns.count("light") <= 6


def test_what_begins_without_waiting_counts_too() -> None:
    queue: FairQueue[QueuedRequest] = FairQueue()
    queue.begin(request("heavy", 1000))
    queue.push(request("heavy", 10))
    queue.push(request("light", 10))
    assert [begin_next(queue).key for _ in range(2)] == ["light", "heavy"]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-3, 3), sizes), max_size=40))
def test_the_more_important_begin_first_and_of_a_key_the_older(
    asked: list[tuple[str, int, int]],
) -> None:
    queue: FairQueue[QueuedRequest] = FairQueue()
    for at, (key, priority, tokens) in enumerate(asked):
        queue.push(request(key, tokens, priority=priority, arrived=float(at)))
    begun = [begin_next(queue) for _ in asked]
    assert queue.first() is None
    assert [each.priority for each in begun] == sorted(each.priority for each in begun)
    for key in KEYS:
        mine = [(each.priority, each.arrived) for each in begun if each.key == key]
        assert mine == sorted(mine)


def test_an_answer_shorter_than_thought_is_paid_back_and_a_longer_one_paid() -> None:
    queue: FairQueue[QueuedRequest] = FairQueue()
    short, long = request("short", 1000), request("long", 10)
    queue.begin(short)
    queue.begin(long)
    queue.correct(short, 10)
    queue.correct(long, 5000)
    for key in ("long", "short", "short"):
        queue.push(request(key, 100))
    assert [begin_next(queue).key for _ in range(3)] == ["short", "short", "long"]


def test_the_least_important_and_newest_leaves_for_a_more_important_one() -> None:
    queue: FairQueue[QueuedRequest] = FairQueue()
    low = [
        request("a", priority=5, arrived=1),
        request("b", priority=5, arrived=2),
        request("a", priority=4, arrived=3),
    ]
    for each in low:
        queue.push(each)
    assert queue.displaced_by(request("c", priority=0)) is low[1]
    assert queue.displaced_by(request("c", priority=6)) is None


def test_among_equals_the_key_with_most_places_for_its_weight_makes_room() -> None:
    queue: FairQueue[QueuedRequest] = FairQueue()
    many = [request("heavy", arrived=float(at)) for at in range(4)]
    for each in many:
        queue.push(each)
    queue.push(request("light"))
    assert queue.displaced_by(request("light")) is many[-1]
    assert queue.displaced_by(request("heavy")) is None
    queue.push(request("light"))
    queue.push(request("light"))
    assert queue.displaced_by(request("light")) is None  # it would then have as many as heavy
