"""A scheduler with a model that is a pure function, for tests without tensors."""

from __future__ import annotations

from invariants import check_scheduler

from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.request import Fetch, Request, StepPlan
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import Ticket

BLOCK, EOS = 16, 1


def next_token(tokens: list[int]) -> int:
    return 2 + (sum(tokens) * 31 + len(tokens) * 7) % 97


def expected(prompt: list[int], count: int) -> list[int]:
    """Return the prompt and the answer of `count` tokens at most."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens


def make(blocks: int = 64, **options) -> Scheduler:
    options = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 100_000,
        "eos_token_ids": (EOS,),
    } | options
    return Scheduler(BlockPool(blocks), block_size=BLOCK, **options)


def request(
    name: str, prompt: list[int], max_tokens: int = 5, choice: int = 0, **submit
) -> Request:
    params = SamplingParams(max_tokens, seed=0, choice=choice, temperature=0)
    return Request.from_submit(Submit(name, prompt, params, **submit), 0.0)


def ticket(tokens: int) -> Ticket:
    """Return a ticket for blocks 500 and up."""
    blocks = range(500, 500 - (-tokens // BLOCK))
    return Ticket(num_tokens=tokens, remote_block_ids=[list(blocks)])


def fetching(name: str, prompt: list[int], max_tokens: int = 5, early: bool = False) -> Request:
    """Return a request whose KV is fetched; an `early` one's first token comes with the KV."""
    generated = [] if early else [next_token(prompt)]
    return request(name, prompt, max_tokens, generated=generated, fetch=ticket(len(prompt)))


def all_free(scheduler: Scheduler) -> bool:
    return scheduler.pool.free == scheduler.pool.total


def start_fetch(scheduler: Scheduler) -> Fetch:
    (fetch,) = scheduler.schedule(0.0).fetches
    check_scheduler(scheduler)
    return fetch


def launch(scheduler: Scheduler) -> StepPlan:
    """Schedule a step that is in flight from then on."""
    plan = scheduler.schedule(0.0)
    check_scheduler(scheduler)
    for chunk in plan.chunks:
        assert len(chunk.request.blocks) * BLOCK >= chunk.start + chunk.count
        scheduler.mark_launched(chunk)
    return plan


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Run one step and return (request, start, count) of every chunk."""
    plan = launch(scheduler)
    for chunk in plan.chunks:
        if chunk.samples:
            scheduler.append(chunk.request, next_token(chunk.request.token_ids), 0.0)
    check_scheduler(scheduler)
    return [(c.request.request_id, c.start, c.count) for c in plan.chunks]


def drain(scheduler: Scheduler) -> None:
    for _ in range(10_000):
        if not scheduler.has_work:
            return
        step(scheduler)
    raise AssertionError("the scheduler does not come to an end")
