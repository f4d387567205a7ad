"""Proposed tokens change how many steps an answer takes and nothing else: no token, and no block's
owner.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import GPU_SIZES, ON_GPU, SAMPLED, drain, make, output, prompt, submit
from invariants import check_scheduler
from scheduling import make as make_scheduler
from scheduling import request
from tiny_models import make_tiny

from kvrelay.paged_engine.request import Chunk, Request
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.paged_engine.speculation import ROWS, Speculation
from kvrelay.wire.config import SpeculativeConfig
from kvrelay.wire.outputs import Finish

ON = {"speculative_config": SpeculativeConfig(5, prompt_lookup_max=3, prompt_lookup_min=1)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("Qwen3ForCausalLM", folder)
    return folder


def repetitive(length: int) -> list[int]:
    """A few words over and over."""
    rng = random.Random(0)
    words = [prompt(rng.randint(2, 5), seed=i) for i in range(3)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(words)
    return tokens[:length]


KINDS = {
    "greedy": {},
    "seeded": {"temperature": 0.3},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "logprobs": {"temperature": 0.3, "logprobs": 3},
    "penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logprobs": 1,
    },
    "all": SAMPLED | {"logprobs": 2},
    "min_tokens": {"ignore_eos": False, "min_tokens": 9, "logit_bias": ((2, 4.0),)},
    "stop": {"stop_token_ids": tuple(range(3, 40))},
    "bias": {"logit_bias": ((77, 9.0), (78, 8.5)), "frequency_penalty": 0.5},
}


def answers(folder: Path, max_tokens: int, **options) -> tuple[dict[str, object], Speculation]:
    engine, requests = make(folder, **options), {}
    for name, params in KINDS.items():
        for kind, tokens in (("random", prompt(33, seed=7)), ("repetitive", repetitive(50))):
            of = submit(engine, f"{name}-{kind}", tokens, **({"max_tokens": max_tokens} | params))
            requests[f"{name}-{kind}"] = of
    drain(engine)
    told = {
        name: (output(r), r.finish, r.new_tokens, r.new_logprobs) for name, r in requests.items()
    }
    return told, engine.scheduler.speculation


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 21},
        {"max_num_seqs": 3},
        {"kv_cache_memory_bytes": 24 * 16 * 3 * 2 * 2 * 64},
    ],
    ids=["roomy", "small-budget", "few-seats", "few-blocks"],
)
def test_answers_are_those_without_proposals(options, tiny):
    limits = {"max_model_len": 128} | options
    plain, nothing = answers(tiny, 70, **limits)
    speculated, some = answers(tiny, 70, **limits, **ON)
    assert speculated == plain
    assert (nothing.drafts, nothing.draft_tokens, nothing.accepted_tokens) == (0, 0, 0)
    assert 0 < some.accepted_tokens <= some.draft_tokens
    assert 0 < some.drafts <= some.draft_tokens
    assert {finish for _, finish, _, _ in plain.values()} == {Finish.STOP, Finish.LENGTH}


def test_a_text_that_repeats_itself_takes_fewer_steps(tiny):
    """A bias makes the model say two tokens in turn."""
    params = {"max_tokens": 60, "logit_bias": ((77, 60.0), (78, 58.0)), "frequency_penalty": 2.0}
    steps = {}
    for name, options in (("plain", {}), ("speculated", ON)):
        engine = make(tiny, **options)
        req = submit(engine, "r", prompt(20), **params)
        drain(engine)
        steps[name] = engine.counters.steps
        assert engine.counters.generated_tokens == 60
        assert len(output(req)) == 60
    assert steps["plain"] == 60
    assert steps["speculated"] < 30
    timing, told = req.timing(1.0), engine.scheduler.speculation
    assert (timing.draft_tokens, timing.accepted_tokens) == (
        told.draft_tokens,
        told.accepted_tokens,
    )


def test_a_second_turn_finds_the_blocks_of_accepted_tokens(tiny):
    """Also those that were accepted in the last step, and none that were not."""
    tokens = repetitive(40)
    engine = make(tiny, **ON)
    first = submit(engine, "first", tokens, max_tokens=60)
    drain(engine)
    turn = [*first.token_ids, *prompt(5)]
    second = submit(engine, "second", turn)
    drain(engine)
    assert second.cached_tokens == (len(first.token_ids) - 1) // 16 * 16
    fresh = make(tiny)
    alone = submit(fresh, "second", turn)
    drain(fresh)
    assert output(second) == output(alone)


@pytest.mark.gpu
def test_a_batch_invariant_gpu_keeps_its_tokens(tmp_path):
    """One step ahead of the host, in graphs and in chunks, with requests that must not draw ahead
    among them.
    """
    make_tiny("Qwen3ForCausalLM", tmp_path, **GPU_SIZES)
    options = ON_GPU | {
        "batch_invariant": True,
        "max_num_batched_tokens": 512,
        "max_model_len": 128,
        "max_num_seqs": 32,
    }
    plain, _ = answers(tmp_path, 70, **options)
    speculated, some = answers(tmp_path, 70, **options, **ON)
    assert {name: told[:3] for name, told in speculated.items()} == {
        name: told[:3] for name, told in plain.items()
    }
    for name, (*_, ours) in speculated.items():
        assert [x.logprob for x in ours] == pytest.approx(
            [x.logprob for x in plain[name][3]], abs=1e-5
        )
    assert 0 < some.accepted_tokens <= some.draft_tokens


# --- the scheduler alone


def alone(tokens: list[int], max_tokens: int, **options) -> tuple[Scheduler, Request]:
    options = {"max_model_len": 1000, "speculation": Speculation(4, 3, 2)} | options
    scheduler, req = make_scheduler(**options), request("r", tokens, max_tokens)
    scheduler.add(req)
    (chunk,) = scheduler.schedule(0.0).chunks
    scheduler.mark_launched(chunk)
    assert chunk.proposals == ()
    return scheduler, req


def next_chunk(scheduler: Scheduler) -> Chunk:
    (chunk,) = scheduler.schedule(0.0).chunks
    scheduler.mark_launched(chunk)
    check_scheduler(scheduler)
    return chunk


LOOP = [5, 6, 7, 5, 6]


@pytest.mark.parametrize(
    ("options", "max_tokens", "count"),
    [
        ({}, 50, 4),
        ({"max_num_batched_tokens": 5}, 50, 4),
        ({"max_num_batched_tokens": 3}, 50, 2),
        ({"max_num_batched_tokens": 1}, 50, 0),
        ({"max_num_seqs": 2}, 50, 1),
        ({"max_num_seqs": 1}, 50, 0),
        ({"max_model_len": 8}, 50, 2),
        ({"max_model_len": 6}, 50, 0),
        ({}, 7, 2),
        ({}, 5, 0),
    ],
)
def test_proposals_fit_the_budget_the_rows_the_context_and_what_was_asked_for(
    options, max_tokens, count
):
    scheduler, req = alone([5], max_tokens, **options)
    for token in (6, 7, 5, 6):  # a token at a time, whatever the budget
        scheduler.append_sampled(req, [token], 0.0)
        if req.token_ids != LOOP:
            chunk = next_chunk(scheduler)
            assert chunk.proposals == ()
    assert len(next_chunk(scheduler).proposals) == count


def test_a_request_whose_proposals_are_under_way_waits_for_them():
    scheduler, req = alone(LOOP, 50)
    assert scheduler.needs_tokens, "the next proposals depend on the token under way"
    assert scheduler.schedule(0.0).chunks[0].proposals == (), "who does not wait gets none"
    scheduler, req = alone(LOOP, 50)
    scheduler.append_sampled(req, [7], 0.0)
    assert next_chunk(scheduler).proposals
    assert scheduler.needs_tokens
    assert scheduler.schedule(0.0).chunks == []
    scheduler.append_sampled(req, [9, 5, 6, 7, 5], 0.0)
    assert not scheduler.needs_tokens
    assert next_chunk(scheduler).token_ids == [9]


def test_only_requests_that_the_sampler_can_draw_ahead_get_proposals():
    scheduler, req = alone(LOOP, 50)
    scheduler.speculation.can_speculate = lambda request: request is not req
    scheduler.append_sampled(req, [7], 0.0)
    assert next_chunk(scheduler).proposals == ()


def test_a_step_of_many_requests_shares_its_rows() -> None:
    speculation = Speculation(4, 3, 1)
    chunks = [Chunk(request(f"r{at}", [7, 8] * 10, 100), 19, 1, samples=True) for at in range(24)]
    extended = speculation.with_proposals(chunks, 1000, 1000, lambda request, tokens: tokens)
    counts = [len(chunk.proposals) for chunk in extended]
    assert sum(counts) + 24 == ROWS
    assert max(counts) - min(counts) <= 1
