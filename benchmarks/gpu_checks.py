"""What must hold on a GPU beside speed: `python -m benchmarks.gpu_checks [invariance] [near-ties]
[soak]`.

Llama-3.2-1B shape, random weights.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.outputs import TokenLogprobs
from kvrelay.wire.sampling import SamplingParams

MODEL = Path(__file__).parent / "models" / "llama-3.2-1b.json"
PROMPTS, MOST_TOKENS, OUTPUT = 40, 1500, 24


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one request and what the engine says of each."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


def open_engine(**options: Any) -> Engine:
    """An engine with random weights."""
    defaults: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
    }
    return Engine(EngineConfig(model=str(MODEL), load_format="dummy", **(defaults | options)))


def answers(
    engine: Engine, prompts: Sequence[list[int]], at_a_time: int, order: random.Random | None
) -> list[Answer]:
    """Every prompt's answer, half of them greedy, `at_a_time` requests running; `order` mixes
    arrivals and steps.
    """
    requests = [
        Request.from_submit(
            Submit(
                f"r{index}",
                prompt,
                SamplingParams(
                    OUTPUT, seed=index, temperature=0.8 * (index % 2), logprobs=5, ignore_eos=True
                ),
            ),
            float(index),
        )
        for index, prompt in enumerate(prompts)
    ]
    waiting = list(requests)
    if order is not None:
        order.shuffle(waiting)
    logprobs: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    running = 0
    while waiting or engine.has_work:
        while waiting and running < at_a_time and (order is None or order.random() < 0.7):
            engine.scheduler.add(waiting.pop())
            running += 1
        for request in engine.step():
            logprobs[request.request_id] += request.new_logprobs
            request.new_logprobs = []
            running -= request.finish is not None
    return [Answer(r.token_ids[r.prompt_tokens :], logprobs[r.request_id]) for r in requests]


def random_prompts(vocab_size: int) -> list[list[int]]:
    """Of 1 to MOST_TOKENS tokens, among them the edges of tiles and chunks."""
    rng = random.Random(0)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 1024, MOST_TOKENS]
    lengths += [rng.randint(1, MOST_TOKENS) for _ in range(PROMPTS - len(lengths))]
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def invariance() -> None:
    """Batch-invariant mode: tokens and log-probabilities bit for bit, alone, in one batch, in any
    order and chunks.
    """
    alone = together = chunked = None
    for options in (
        {"batch_invariant": True},
        {"batch_invariant": True, "max_num_batched_tokens": 700},
    ):
        engine = open_engine(kv_cache_memory_bytes=8 << 30, **options)
        prompts = random_prompts(engine.model.vocab_size)
        if alone is None:
            alone = answers(engine, prompts, 1, None)
            together = answers(engine, prompts, PROMPTS, random.Random(1))
        else:
            chunked = answers(engine, prompts, PROMPTS, random.Random(2))
        engine.close()
        del engine
        torch.cuda.empty_cache()
    for name, others in (("one batch", together), ("one batch in chunks of 700", chunked)):
        assert alone is not None
        assert others is not None
        equal = sum(a == b for a, b in zip(alone, others, strict=True))
        print(
            f"batch-invariant, each prompt alone against {name}: {equal} of {PROMPTS} equal to "
            f"the bit",
            flush=True,
        )
        assert equal == PROMPTS


def near_ties() -> None:
    """Without that mode: where a batch changes a token, how far apart the two candidates were."""
    engine = open_engine(kv_cache_memory_bytes=8 << 30)
    prompts = random_prompts(engine.model.vocab_size)
    alone, together = (
        answers(engine, prompts, 1, None),
        answers(engine, prompts, PROMPTS, random.Random(1)),
    )
    gaps, drift, seeded = [], 0.0, 0
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        for place, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            drift = max(
                drift,
                abs(one.logprobs[place].top_logprobs[0] - other.logprobs[place].top_logprobs[0]),
            )
            if mine != theirs:
                if index % 2:
                    seeded += (
                        1  # a draw near the edge between two tokens of the cumulative distribution
                    )
                else:
                    likeliest = dict(
                        zip(
                            one.logprobs[place].top_ids,
                            one.logprobs[place].top_logprobs,
                            strict=True,
                        )
                    )
                    gaps.append(likeliest[mine] - likeliest.get(theirs, float("-inf")))
                break
    worst = max(gaps, default=0.0)
    print(
        f"default mode, alone against one batch: {PROMPTS - len(gaps) - seeded} of {PROMPTS} "
        f"equal; greedy answers "
        f"that part: {len(gaps)}, largest gap of the two tokens {worst:.4f} in log-probability; "
        f"seeded: {seeded}; "
        f"largest drift of the likeliest token's log-probability {drift:.4f}",
        flush=True,
    )
    engine.close()


def soak() -> None:
    """10,000 requests of random lengths, some aborted: nothing grows, all blocks come back."""
    engine = open_engine(
        max_num_seqs=128, kv_cache_memory_bytes=4 << 30, enable_prefix_caching=True
    )
    rng = random.Random(0)
    live: list[Request] = []
    marks = []
    began = time.perf_counter()
    for index in range(10_000):
        prompt = [rng.randrange(3, 1000) for _ in range(rng.randint(1, 600))]
        cut: dict[str, Any] = {"top_k": 40, "top_p": 0.9} if rng.random() < 0.2 else {}
        penalty: dict[str, Any] = (
            {"presence_penalty": 0.5, "min_tokens": 2} if rng.random() < 0.1 else {}
        )
        params = SamplingParams(
            rng.randint(1, 64), seed=index, temperature=rng.choice((0.0, 0.9)), **cut, **penalty
        )
        live.append(Request.from_submit(Submit(f"r{index}", prompt, params), time.monotonic()))
        engine.scheduler.add(live[-1])
        while engine.scheduler.load(time.monotonic()).waiting > 32:
            engine.step()
        live = [request for request in live if request.finish is None]
        if rng.random() < 0.02 and live:
            engine.scheduler.abort(rng.choice(live).request_id)
        if index % 2500 == 2499:
            torch.cuda.synchronize()
            rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            marks.append(
                (
                    index + 1,
                    torch.cuda.memory_reserved() >> 20,
                    torch.cuda.memory_allocated() >> 20,
                    rss_mib,
                )
            )
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    pool = engine.scheduler.pool
    for done, reserved, allocated, rss in marks:
        print(
            f"after {done:6} requests: GPU {reserved} MiB reserved, {allocated} MiB allocated; "
            f"host peak {rss} MiB"
        )
    print(
        f"{engine.counters.generated_tokens} tokens in {time.perf_counter() - began:.0f} s, "
        f"{engine.scheduler.preemptions} preemptions; free blocks {pool.free} of {pool.total}",
        flush=True,
    )
    assert pool.free == pool.total
    engine.close()


def main() -> None:
    """Run the named checks, or all."""
    checks = {"invariance": invariance, "near-ties": near_ties, "soak": soak}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(checks))
    names = parser.parse_args().names
    if unknown := set(names) - set(checks):
        sys.exit(f"unknown check {', '.join(unknown)}; there are {', '.join(checks)}")
    for name in names:
        checks[name]()


if __name__ == "__main__":
    main()
