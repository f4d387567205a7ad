"""A request that asks a peer for a part of its prompt's KV. Random ones are in test_scheduler.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from invariants import check_scheduler
from scheduling import (
    BLOCK,
    all_free,
    drain,
    expected,
    make,
    next_token,
    request,
    start_fetch,
    step,
    ticket,
)

from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.outputs import Finish
from kvrelay.wire.step_costs import MEMORY_MS, StepCosts

PROMPT = list(range(70))


def asking(scheduler: Scheduler, name: str = "r", **submit: object) -> Request:
    req = request(name, PROMPT, **submit)
    scheduler.add(req)
    req.asking, req.pull_from = True, scheduler.cached_tokens(req) // BLOCK
    return req


def test_others_pass_until_the_answer_comes() -> None:
    scheduler = make()
    req = asking(scheduler)
    scheduler.add(request("fork", PROMPT, choice=1, fork_of="r"))
    scheduler.add(request("other", [9] * 20))
    assert step(scheduler) == [("other", 0, 20)]
    scheduler.end_ask(req, None)
    assert step(scheduler)[1:] == [("r", 0, 64)]
    drain(scheduler)
    assert req.token_ids == expected(PROMPT, 5)
    assert (req.cached_tokens, req.pulled_tokens) == (0, 0)


@pytest.mark.parametrize("hold", [False, True])
def test_what_came_is_cached_and_the_rest_is_computed_in_chunks(*, hold: bool) -> None:
    scheduler = make(max_num_batched_tokens=20)
    req = asking(scheduler, max_tokens=1, hold=hold)
    scheduler.end_ask(req, ticket(2 * BLOCK))
    plan = scheduler.schedule(0.0)
    (fetch,) = plan.fetches
    assert (fetch.remote_blocks, fetch.local_blocks) == ([500, 501], req.blocks[:2])
    assert plan.offers == []
    assert len(req.blocks) == 5, "all of its prompt has room"
    scheduler.finish_fetch("r")
    check_scheduler(scheduler)
    assert (req.cached_tokens, req.pulled_tokens, scheduler.pool.cached) == (32, 32, 2)
    first = scheduler.schedule(0.0)
    assert first.offers == [req] * hold
    assert [(chunk.start, chunk.count) for chunk in first.chunks] == [(32, 20)]
    scheduler.mark_launched(first.chunks[0])
    assert scheduler.schedule(0.0).offers == []
    assert step(scheduler) == [("r", 52, 18)]
    assert req.finish is Finish.LENGTH
    assert (scheduler.kept.held("r") is not None) == hold
    scheduler.kept.release("r")
    assert all_free(scheduler)


def test_blocks_behind_what_is_cached_are_read_and_take_no_share_of_the_time() -> None:
    scheduler = make()
    scheduler.budget = replace(scheduler.budget, costs=StepCosts(8.0, 0.0, 0.0, 0.0, 0.125, 0.0))
    scheduler.add(request("before", PROMPT[: 2 * BLOCK], max_tokens=1))
    drain(scheduler)
    req = asking(scheduler)
    assert req.pull_from == 2
    scheduler.end_ask(req, ticket(2 * BLOCK))
    req.fetch = ticket(2 * BLOCK)
    assert start_fetch(scheduler).remote_blocks == [500, 501]
    scheduler.finish_fetch("r")
    assert (req.cached_tokens, req.pulled_tokens) == (64, 32)
    assert scheduler.load(0.0).prompt_share == pytest.approx((32 + 6) * 0.125 / MEMORY_MS)
    assert step(scheduler) == [("r", 64, 6)]


@pytest.mark.parametrize("gone", [True, False], ids=["evicted", "computed"])
def test_a_ticket_that_no_longer_fits_is_given_back(*, gone: bool) -> None:
    """An empty fetch ends the lease."""
    scheduler = make()
    if gone:
        scheduler.add(request("before", PROMPT[: 2 * BLOCK], max_tokens=1))
        drain(scheduler)
    req = asking(scheduler)
    if gone:
        scheduler.reset_prefix_cache()
    else:
        scheduler.add(request("before", PROMPT, max_tokens=1))
        while scheduler.get("before") is not None:
            step(scheduler)
    scheduler.end_ask(req, ticket(2 * BLOCK))
    fetch = start_fetch(scheduler)
    assert fetch.remote_blocks == fetch.local_blocks == []
    scheduler.finish_fetch("r")
    check_scheduler(scheduler)
    known = 0 if gone else 4 * BLOCK
    assert (req.cached_tokens, req.pulled_tokens) == (known, 0)
    drain(scheduler)
    assert req.token_ids == expected(PROMPT, 5)
    assert all_free(scheduler)


@pytest.mark.parametrize("verified", [0, 1, 2])
def test_a_failed_read_keeps_what_is_verified_and_is_no_failure_of_the_request(
    verified: int,
) -> None:
    scheduler = make()
    req = asking(scheduler, hold=True, max_tokens=1)
    scheduler.end_ask(req, ticket(2 * BLOCK))
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", verified)
    check_scheduler(scheduler)
    assert (req.fetch_error, req.pulled_tokens) == (None, verified * BLOCK)
    plan = scheduler.schedule(0.0)
    assert plan.offers == [req]
    assert plan.chunks[0].start == verified * BLOCK
    assert len(req.blocks) == 5
    scheduler.mark_launched(plan.chunks[0])
    if plan.chunks[0].samples:
        scheduler.append(req, next_token(req.token_ids), 0.0)
    scheduler.kept.settle("r")
    drain(scheduler)
    scheduler.kept.release("r")
    assert req.token_ids == expected(PROMPT, 1)
    assert all_free(scheduler)
