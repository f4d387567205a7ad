"""Engines of tiny models, and requests to them."""

from __future__ import annotations

import random
from pathlib import Path

from invariants import check_scheduler

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams

# Sizes that the GPU's kernels are for; and little memory and few graphs, as other tests use the GPU
# at the same time.
GPU_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
ON_GPU = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 64 << 20,
}
SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
}


def make(folder: Path, **options) -> Engine:
    defaults = {"device": "cpu", "kv_cache_memory_bytes": 8 << 20, "threads": 1}
    return Engine(EngineConfig(model=str(folder), **(defaults | options)))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def submit(engine: Engine, name: str, tokens: list[int], **params) -> Request:
    defaults = {"max_tokens": 24, "seed": 5, "temperature": 0.0, "ignore_eos": True}
    generated, fork_of = params.pop("generated", []), params.pop("fork_of", None)
    sampling = SamplingParams(**(defaults | params))
    req = Request.from_submit(
        Submit(name, tokens, sampling, generated=generated, fork_of=fork_of), 0.0
    )
    engine.scheduler.add(req)
    return req


def drain(engine: Engine) -> None:
    for _ in range(5000):
        if not engine.has_work:
            break
        engine.step()
        check_scheduler(engine.scheduler)
    assert engine.scheduler.pool.free == engine.scheduler.pool.total


def output(req: Request) -> list[int]:
    return req.token_ids[req.prompt_tokens :]
