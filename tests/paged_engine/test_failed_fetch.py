"""What a request does when its KV does not come: it keeps what is proven and computes the rest, or
ends.

The random schedules run over a memory that knows of each position which tokens its KV was computed
from, so that a step which attends to a wrong or missing one is found, whatever led to it.
"""

from __future__ import annotations

import random

import pytest

from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.request import Request, State
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.paged_engine.step_plan import Chunk, Fetch
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.outputs import Finish
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import Ticket

BLOCK, EOS = 16, 1


def make(blocks: int = 64, **options) -> Scheduler:
    defaults = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 10_000}
    return Scheduler(
        BlockPool(blocks), block_size=BLOCK, eos_token_ids=(EOS,), **(defaults | options)
    )


def next_token(tokens: list[int]) -> int:
    return 2 + (sum(tokens) * 31 + len(tokens) * 7) % 97


def answered(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


def fetching(name: str, prompt: list[int], max_tokens: int = 5, early: bool = True) -> Request:
    blocks = -(-len(prompt) // BLOCK)
    ticket = Ticket(
        num_tokens=len(prompt),
        remote_block_ids=[list(range(500, 500 + blocks))],
    )
    generated = [] if early else [next_token(prompt)]
    params = SamplingParams(max_tokens, seed=0, temperature=0)
    return Request.from_submit(Submit(name, prompt, params, generated=generated, fetch=ticket), 0.0)


def start_fetch(scheduler: Scheduler) -> Fetch:
    (fetch,) = scheduler.schedule(0.0).fetches
    return fetch


def chunks(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step; (start, count) of what it computes."""
    plan = scheduler.schedule(0.0)
    for chunk in plan.chunks:
        scheduler.mark_launched(chunk)
        if chunk.samples:
            scheduler.append(chunk.request, next_token(chunk.request.token_ids), 0.0)
    scheduler.check()
    return [(chunk.start, chunk.count) for chunk in plan.chunks]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("proven", "kept"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_what_is_proven_is_kept_and_the_rest_is_computed(
    proven: int, kept: int, prefix_cache: bool
) -> None:
    """The third block is not full: nobody could find it again, and one token must be computed
    anyway.
    """
    scheduler = make(prefix_cache=prefix_cache)
    req = fetching("r", list(range(40)))
    scheduler.add(req)
    fetch = start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", proven)
    scheduler.check()
    assert req.blocks == fetch.local_blocks[:kept]
    assert scheduler.pool.quarantined == 3 - kept
    assert scheduler.kept_blocks == kept
    assert scheduler.pool.cached == (kept if prefix_cache else 0)
    assert chunks(scheduler) == [(kept * BLOCK, 40 - kept * BLOCK)]
    scheduler.kept.settle("r")
    while scheduler.has_work:
        chunks(scheduler)
    assert req.token_ids == answered(list(range(40)), 5)
    assert scheduler.pool.free == scheduler.pool.total
    assert scheduler.pool.quarantined == 0


def test_the_last_token_of_a_prompt_of_whole_blocks_is_computed() -> None:
    scheduler = make()
    scheduler.add(fetching("r", list(range(32))))
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", 2)
    assert chunks(scheduler) == [(16, 16)]


def test_with_the_first_token_known_all_whole_blocks_are_kept() -> None:
    scheduler = make()
    scheduler.add(fetching("r", list(range(32)), early=False))
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", 2)
    assert chunks(scheduler) == [(32, 1)]


def test_proven_blocks_come_behind_those_that_were_cached() -> None:
    scheduler = make()
    scheduler.add(fetching("before", list(range(20)), max_tokens=1))
    start_fetch(scheduler)
    scheduler.finish_fetch("before", [EOS])
    req = fetching("r", list(range(60)))
    scheduler.add(req)
    fetch = start_fetch(scheduler)
    assert fetch.remote_blocks == [501, 502, 503]
    scheduler.fail_fetch("r", "PeerLost: gone", 1)
    assert chunks(scheduler) == [(32, 28)]
    assert scheduler.kept_blocks == 1


def test_without_room_for_the_rest_it_waits_and_finds_the_proven_blocks_again() -> None:
    scheduler = make(blocks=6)  # 5, of which 4 are fetched to; the quarantine leaves too few
    req = fetching("r", list(range(60)))
    scheduler.add(req)
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", 1)
    assert req.state is State.WAITING
    assert chunks(scheduler) == []
    scheduler.kept.settle("r")
    assert chunks(scheduler) == [(16, 44)]
    assert scheduler.preemptions == 0


def test_a_request_that_is_given_up_ends_with_an_error_and_its_blocks_stay_until_settled() -> None:
    scheduler = make()
    req = fetching("r", list(range(40)))
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
    """Fetches fail with some blocks proven; the others are written to until they are settled, and
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
            proven = rng.randint(0, len(fetch.local_blocks))
            if rng.random() < 0.3:
                memory.write(fetch.local_blocks, prompt, first, right=True)
                scheduler.finish_fetch(name, [next_token(prompt)])
            else:
                memory.write(fetch.local_blocks[:proven], prompt, first, right=True)
                landing[name] = (fetch.local_blocks[proven:], first + proven)
                if rng.random() < 0.2:
                    scheduler.end_failed_fetch(name, "x")
                else:
                    scheduler.fail_fetch(name, "x", proven)
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
            expected = answered(prompt, count)
            over = next(
                (at + 1 for at in range(len(prompt), len(expected)) if expected[at] == EOS),
                len(expected),
            )
            assert req.token_ids == expected[:over]
            ended += 1
    assert ended > 20
    assert scheduler.kept_blocks > 5
