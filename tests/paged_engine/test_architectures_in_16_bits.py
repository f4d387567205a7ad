"""Every architecture in 16 bits, on the CPU and on a GPU, against the CPU in fp32.

That the CPU in fp32 equals transformers is shown in test_engine.py and test_architectures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import GPU_SIZES, ON_GPU, drain, make, prompt
from tiny_models import DIFFERENCES, FURTHER_DIFFERENCES, make_tiny

from kvrelay.paged_engine.request import Chunk, Request
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.sampling import SamplingParams

# An output layer of its own: else the token before is the likeliest.
SIZES = GPU_SIZES | {"tie_word_embeddings": False}
WITH_IMAGES = "Gemma3ForConditionalGeneration"  # Gemma 3 by other names
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}


def cases() -> Iterator[Any]:
    for architecture in sorted({*DIFFERENCES, *FURTHER_DIFFERENCES} - {WITH_IMAGES}):
        yield pytest.param(architecture, "cpu", "bfloat16")
        yield pytest.param(architecture, "cuda", "bfloat16", marks=pytest.mark.gpu)
    # Every start of a GPU's engine compiles kernels, so in fp16 only those which differ most.
    for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma2ForCausalLM"):
        yield pytest.param(architecture, "cuda", "float16", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("architecture", "device", "dtype"), list(cases()))
def test_log_probabilities_are_those_of_fp32(
    tmp_path: Path, architecture: str, device: str, dtype: str
) -> None:
    """Greedy answers to prompts in chunks and batches: each token's log-probability, and how far it
    is from the best.

    Both are measured in standard deviations of the log-probabilities of all tokens.
    """
    sizes = SIZES | (EXPERTS if architecture == "Qwen3MoeForCausalLM" else {})
    make_tiny(architecture, tmp_path, **sizes)
    options = {"kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    try:
        engine = make(tmp_path, **(ON_GPU | options | {"device": device, "dtype": dtype}))
    except ConfigError as error:
        if device == "cpu" and "matrix library" in str(error):
            pytest.skip(str(error))
        raise
    params = SamplingParams(16, temperature=0.0, seed=1, logprobs=1, ignore_eos=True)
    requests = [
        Request.from_submit(Submit(f"r{n}", prompt(n, seed=n), params), 0.0)
        for n in (1, 17, 64, 150, 200)
    ]
    for request in requests:
        engine.scheduler.add(request)
    drain(engine)

    exact = make(tmp_path, max_num_batched_tokens=256)
    errors, gaps = [], []
    for request in requests:
        twin = Request.from_submit(Submit("twin", request.token_ids[:-1], params), 0.0)
        twin.blocks = exact.scheduler.pool.allocate(14) or []
        for place, given in enumerate(request.new_logprobs):
            end = request.prompt_tokens + place
            start = 0 if place == 0 else end - 1
            theirs = exact._runner.run([Chunk(twin, start, end - start, True)])[0][0].log_softmax(
                -1
            )
            chosen = theirs[request.token_ids[end]]
            errors.append(abs(given.logprob - float(chosen)) / float(theirs.std()))
            gaps.append(float((theirs.max() - chosen) / theirs.std()))
        exact.scheduler.pool.release(twin.blocks)
    errors.sort()
    gaps.sort()
    assert len(errors) == 5 * 16
    # A near-tie between experts can fall the other way, which moves a token's result by more than
    # rounding does.
    limit = {"bfloat16": 0.1, "float16": 0.02}[dtype]
    assert errors[72] < limit, (
        f"median {errors[40]:.4f}, 90 % {errors[72]:.4f}, worst {errors[-1]:.4f}"
    )
    assert gaps[72] < limit, f"not the likeliest tokens: 90 % {gaps[72]:.4f}, worst {gaps[-1]:.4f}"
