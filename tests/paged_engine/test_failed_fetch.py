"""What a request does when its KV does not come: it keeps what is verified and computes the rest,
or ends.

The random schedules run over a memory that knows of each position which tokens its KV was computed
from, so that a step which attends to a wrong or missing one is found, whatever led to it.
"""

from __future__ import annotations

import random

import pytest
from scheduling import BLOCK, EOS, drain, expected, fetching, make, next_token, start_fetch, step

from kvrelay.paged_engine.request import Chunk, Fetch, Request, State
from kvrelay.wire.outputs import Finish


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("verified", "kept"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_what_is_verified_is_kept_and_the_rest_is_computed(
    verified: int, kept: int, prefix_cache: bool
) -> None:
    """The third block is not full: nobody could find it again, and one token must be computed
    anyway.
    """
    scheduler = make(prefix_cache=prefix_cache)
    req = fetching("r", list(range(40)), early=True)
    scheduler.add(req)
    fetch = start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", verified)
    scheduler.check()
    assert req.blocks == fetch.local_blocks[:kept]
    assert scheduler.pool.quarantined == 3 - kept
    assert scheduler.kept_blocks == kept
    assert req.fetch_error == "PeerLost: gone"
    assert scheduler.pool.cached == (kept if prefix_cache else 0)
    assert step(scheduler) == [("r", kept * BLOCK, 40 - kept * BLOCK)]
    scheduler.kept.settle("r")
    drain(scheduler)
    assert req.token_ids == expected(list(range(40)), 5)
    assert scheduler.pool.free == scheduler.pool.total
    assert scheduler.pool.quarantined == 0


@pytest.mark.parametrize(("early", "chunk"), [(True, (16, 16)), (False, (32, 1))])
def test_of_whole_blocks_the_last_is_kept_if_the_first_token_is_known(
    early: bool, chunk: tuple[int, int]
) -> None:
    scheduler = make()
    scheduler.add(fetching("r", list(range(32)), early=early))
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", 2)
    assert step(scheduler) == [("r", *chunk)]


def test_verified_blocks_come_behind_those_that_were_cached() -> None:
    scheduler = make()
    scheduler.add(fetching("before", list(range(20)), max_tokens=1, early=True))
    start_fetch(scheduler)
    scheduler.finish_fetch("before", [EOS])
    req = fetching("r", list(range(60)), early=True)
    scheduler.add(req)
    fetch = start_fetch(scheduler)
    assert fetch.remote_blocks == [501, 502, 503]
    scheduler.fail_fetch("r", "PeerLost: gone", 1)
    assert step(scheduler) == [("r", 32, 28)]
    assert scheduler.kept_blocks == 1


def test_without_room_for_the_rest_it_waits_and_finds_the_verified_blocks_again() -> None:
    scheduler = make(blocks=6)  # 5, of which 4 are fetched to; the quarantine leaves too few
    req = fetching("r", list(range(60)), early=True)
    scheduler.add(req)
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", 1)
    assert req.state is State.WAITING
    assert step(scheduler) == []
    scheduler.kept.settle("r")
    assert step(scheduler) == [("r", 16, 44)]
    assert scheduler.preemptions == 0


def test_a_request_that_is_given_up_ends_with_an_error_and_its_blocks_stay_until_settled() -> None:
    scheduler = make()
    req = fetching("r", list(range(40)), early=True)
    scheduler.add(req)
    start_fetch(scheduler)
    scheduler.end_failed_fetch("r", "PeerLost: gone")
    scheduler.check()
    assert (req.finish, req.fetch_error) == (Finish.ERROR, "PeerLost: gone")
    assert scheduler.pool.quarantined == 3
    assert not scheduler.has_work
    scheduler.kept.settle("r")
    assert scheduler.pool.free == scheduler.pool.total


class Memory:
    """KV by block and offset: the tokens that it was computed from, or something else."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], object] = {}

    def compute(self, chunk: Chunk) -> None:
        request = chunk.request
        tokens = tuple(request.token_ids)
        for position in range(chunk.start):
            place = request.blocks[position // BLOCK], position % BLOCK
            assert self.kv.get(place) == tokens[: position + 1], (request.request_id, position)
        for position in range(chunk.start, chunk.start + chunk.count):
            self.kv[request.blocks[position // BLOCK], position % BLOCK] = tokens[: position + 1]

    def write(self, blocks: list[int], tokens: list[int], first: int, right: bool) -> None:
        """What a READ writes to blocks of a request, of which these begin with number `first`."""
        for index, block in enumerate(blocks, first):
            for offset in range(BLOCK):
                end = index * BLOCK + offset + 1
                if end <= len(tokens):
                    self.kv[block, offset] = tuple(tokens[:end]) if right else "wrong"


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_random_failures_never_let_a_step_attend_to_kv_that_is_not_its_own(
    seed: int, prefix_cache: bool
) -> None:
    """Fetches fail with some blocks verified; the others are written to until they are settled, and
    later reused.
    """
    rng = random.Random(seed)
    memory = Memory()
    scheduler = make(
        blocks=rng.choice([14, 24, 60]),
        max_num_batched_tokens=rng.choice([8, 33, 64]),
        max_num_seqs=rng.choice([2, 5]),
        prefix_cache=prefix_cache,
    )
    prefix = [rng.randrange(2, 90) for _ in range(64)]
    asked: dict[str, tuple[Request, list[int], int]] = {}
    reading: dict[str, Fetch] = {}
    landing: dict[str, tuple[list[int], int]] = {}  # blocks that a lost READ may still write to
    for turn in range(300):
        if turn < 200 and rng.random() < 0.4:
            prompt = prefix[: rng.randrange(0, 64)] + [
                rng.randrange(2, 90) for _ in range(rng.randint(1, 60))
            ]
            req = fetching(f"r{turn}", prompt, rng.randint(2, 12), early=rng.random() < 0.5)
            scheduler.add(req)
            asked[req.request_id] = (req, prompt, req.params.max_tokens)
        plan = scheduler.schedule(float(turn))
        reading |= {fetch.request.request_id: fetch for fetch in plan.fetches}
        for chunk in plan.chunks:
            memory.compute(chunk)
            scheduler.mark_launched(chunk)
            if chunk.samples:
                scheduler.append(chunk.request, next_token(chunk.request.token_ids), float(turn))
        if reading and (rng.random() < 0.5 or turn > 250):
            name = rng.choice(sorted(reading))
            fetch, (req, prompt, _) = reading.pop(name), asked[name]
            first = len(req.blocks) - len(fetch.local_blocks)
            verified = rng.randint(0, len(fetch.local_blocks))
            if rng.random() < 0.3:
                memory.write(fetch.local_blocks, prompt, first, right=True)
                scheduler.finish_fetch(name, [next_token(prompt)])
            else:
                memory.write(fetch.local_blocks[:verified], prompt, first, right=True)
                landing[name] = (fetch.local_blocks[verified:], first + verified)
                if rng.random() < 0.2:
                    scheduler.end_failed_fetch(name, "x")
                else:
                    scheduler.fail_fetch(name, "x", verified)
        for name, (blocks, first) in list(landing.items()):
            memory.write(blocks, [0] * 10_000, first, right=False)
            if rng.random() < 0.3:
                scheduler.kept.settle(name)
                del landing[name]
        scheduler.check()
    for name in landing:
        scheduler.kept.settle(name)
    ended = 0
    for _ in range(2000):
        for name in [name for name, (req, _, _) in asked.items() if req.state is State.FETCHING]:
            scheduler.fail_fetch(name, "x")
            scheduler.kept.settle(name)
            reading.pop(name, None)
        if not scheduler.has_work:
            break
        for chunk in scheduler.schedule(1000.0).chunks:
            memory.compute(chunk)
            scheduler.mark_launched(chunk)
            if chunk.samples:
                scheduler.append(chunk.request, next_token(chunk.request.token_ids), 0.0)
    assert scheduler.pool.free == scheduler.pool.total
    for req, prompt, count in asked.values():
        if req.finish is not Finish.ERROR:
            assert req.token_ids == expected(prompt, count)
            ended += 1
    assert ended > 20
    assert scheduler.kept_blocks > 5
