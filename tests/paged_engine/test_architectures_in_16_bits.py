"""Every architecture in 16 bits, on the CPU and on a GPU, against the CPU in fp32; needs no
transformers.

That the CPU in fp32 equals transformers is shown in test_engine.py and test_architectures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import pytest
import torch

from kvrelay.paged_engine import engine as engine_module
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.hf_config import parse_model_config
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import tensor_shapes
from kvrelay.paged_engine.request import Chunk, Request
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.sampling import SamplingParams

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
GEMMA: dict[str, Any] = {"sliding_window": 40, "query_pre_attn_scalar": 80}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 40},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "Qwen3ForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
    },
    "Gemma2ForCausalLM": GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 1.0},
    "Gemma3ForCausalLM": GEMMA
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2},
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.75, "sliding_window": 90},
}


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights like those of tiny_models.py, by a checkpoint's names."""
    weights = {}
    for name, shape in tensor_shapes(config).items():
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if name.endswith("norm.weight"):
            weights[name] = 0.3 * values + (0.0 if config.gemma_norms else 1.0)
        elif "embed_tokens" in name and config.tie_embeddings:
            # It is the output layer too, and larger values would make the token before the
            # likeliest one.
            weights[name] = values / (10 * config.embedding_scale**0.5)
        elif name.endswith("bias") or "embed" in name:
            weights[name] = 0.5 * values
        else:
            weights[name] = values / shape[-1] ** 0.5
    return weights


def prompt(length: int) -> list[int]:
    return torch.randint(
        3, 512, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


def cases() -> Iterator[Any]:
    for architecture in MODELS:
        yield pytest.param(architecture, "cpu", "bfloat16")
        yield pytest.param(architecture, "cuda", "bfloat16", marks=pytest.mark.gpu)
    # Every start of a GPU's engine compiles kernels, so in fp16 only those which differ most.
    for architecture in (
        "LlamaForCausalLM",
        "Qwen3MoeForCausalLM",
        "Gemma2ForCausalLM",
    ):
        yield pytest.param(architecture, "cuda", "float16", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("architecture", "device", "dtype"), list(cases()))
def test_log_probabilities_are_those_of_fp32(
    monkeypatch: pytest.MonkeyPatch, architecture: str, device: str, dtype: str
) -> None:
    """Greedy answers to prompts in chunks and batches: each token's log-probability, and how far it
    is from the best.

    Both are measured in standard deviations of the log-probabilities of all tokens.
    """
    model = parse_model_config(
        {"architectures": [architecture], **SIZES, **MODELS[architecture]}, {}, "tiny", "test"
    )
    weights = weights_of(model)
    monkeypatch.setattr(engine_module, "checked_model", lambda *_: model)
    monkeypatch.setattr(engine_module, "weights_digest", lambda _: "")
    monkeypatch.setattr(engine_module, "read_tensors", lambda *_: iter(weights.items()))

    def make(device: str, dtype: str, **options: Any) -> Engine:
        # A small share of a GPU's memory, as other tests use the GPU at the same time.
        config = EngineConfig(
            model="tiny",
            device=device,
            dtype=dtype,
            threads=1,
            kv_cache_memory_bytes=32 << 20,
            gpu_memory_utilization=0.05,
            **options,
        )
        return Engine(config)

    try:
        engine = make(device, dtype, max_num_batched_tokens=96, max_num_seqs=8)
    except ConfigError as error:
        if device == "cpu" and "matrix library" in str(error):
            pytest.skip(str(error))
        raise
    params = SamplingParams(16, temperature=0.0, seed=1, logprobs=1, ignore_eos=True)
    requests = [
        Request.from_submit(Submit(f"r{n}", prompt(n), params), 0.0) for n in (1, 17, 64, 150, 200)
    ]
    for request in requests:
        engine.scheduler.add(request)
    while engine.has_work:
        engine.step()

    exact = make("cpu", "float32", max_num_batched_tokens=256)
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
