"""Whose turn it is: shorter prompts first, and nobody overtaken for ever."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_waiting
from scheduling import BLOCK, make, step, ticket

from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.paged_engine.waiting import OVERTAKEN, WaitingQueue
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams

BUDGET = 64


def request(name: str, tokens: int, priority: int = 0, **submit) -> Request:
    prompt = [random.Random(name).randrange(1 << 20) for _ in range(tokens)]
    params = SamplingParams(1, seed=0, temperature=0)
    return Request.from_submit(Submit(name, prompt, params, priority=priority, **submit), 0.0)


def ends(scheduler: Scheduler) -> list[str]:
    """Who ends, in order."""
    ended: list[str] = []
    while scheduler.has_work:
        before = {each.request_id for each in scheduler.live}
        done = [name for name, _, _ in step(scheduler)]
        left = {each.request_id for each in scheduler.live}
        ended += [name for name in done if name in before - left]
    return ended


def test_a_cached_prompt_counts_by_what_is_left_to_compute():
    scheduler = make(4096, max_num_seqs=64)
    known = request("known", 400)
    scheduler.add(known)
    assert ends(scheduler) == ["known"]
    scheduler.add(request("new", 300))
    scheduler.add(Request.from_submit(Submit("again", known.token_ids[:400], known.params), 0.0))
    assert scheduler.load(0.0).waiting_tokens == 300 + 16
    assert step(scheduler)[0] == ("again", 384, 16)


def test_what_is_fetched_keeps_the_order_of_arrival():
    live: dict[str, Request] = {}
    line = WaitingQueue(live, BLOCK)
    for name, tokens in (("first", 400), ("second", 20), ("third", 100)):
        line.add(request(name, tokens, fetch=ticket(tokens)))
    assert [each.request_id for each in line.candidates()] == ["first", "second", "third"]
    assert line.tokens == 0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 2_000), st.integers(0, 1)), min_size=1, max_size=60))
def test_later_arrivals_overtake_nobody_by_more_than_his_own_length(
    arrivals: list[tuple[int, int]],
):
    line = WaitingQueue({}, BLOCK)
    waiting = [request(str(at), tokens, priority) for at, (tokens, priority) in enumerate(arrivals)]
    for each in waiting:
        line.add(each)
    check_waiting(line)
    for at, each in enumerate(waiting):
        overtaking = [
            later
            for later in waiting[at + 1 :]
            if later.turn < each.turn and later.priority == each.priority
        ]
        assert sum(later.work for later in overtaking) < OVERTAKEN * max(1, each.work)
    priorities = [each.priority for each in line.candidates()]
    assert priorities == sorted(priorities)


@pytest.mark.parametrize("seed", range(5))
def test_a_long_prompt_begins_and_ends_in_bounded_time_however_many_short_ones_come(seed):
    """Short prompts arrive as fast as the engine computes, for ever: without ageing the long one
    would never end.
    """
    rng, scheduler, long = random.Random(seed), make(4096, max_num_seqs=64), request("long", 640)
    computed = 0
    scheduler.add(request("before", 200))
    scheduler.add(long)
    while scheduler.get("long") is not None:
        arriving = 0
        while arriving < BUDGET:
            tokens = rng.randint(4, 60)
            scheduler.add(request(f"{computed}-{arriving}", tokens))
            arriving += tokens
        computed += sum(count for _, _, count in step(scheduler))
        assert computed <= 200 + (1 + OVERTAKEN) * 640 + 2 * BUDGET
    assert computed > 200 + 640 + BUDGET  # it was overtaken


def test_a_preempted_request_comes_back_to_its_place():
    scheduler = make(12, max_num_seqs=64, max_num_batched_tokens=200)
    older, newer = (request(name, 70) for name in ("older", "newer"))
    for each in (older, newer):
        each.params = SamplingParams(40, seed=0, temperature=0)
        scheduler.add(each)
    while not scheduler.preemptions:
        step(scheduler)
    late = request("late", 69)
    scheduler.add(late)
    assert older.turn < newer.turn < late.turn
    begun: list[str] = []
    while "late" not in begun:
        begun += [name for name, _, count in step(scheduler) if count > 1]
    assert begun == ["newer", "late"]
