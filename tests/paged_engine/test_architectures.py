"""All architectures against transformers and against themselves
in other batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make, prompt
from tiny_models import DIFFERENCES, make_tiny

from kvrelay.paged_engine.request import Chunk, Request
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{architecture: (architecture, {}) for architecture in DIFFERENCES},
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3-moe-plain-weights": (
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    ),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "gemma3-with-images": ("Gemma3ForConditionalGeneration", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen3-mixed-windows": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    architecture, overrides = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny(architecture, folder, **overrides)


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_logits_of_all_positions_equal_transformers_in_any_chunks(tiny) -> None:
    folder, model = tiny
    engine = make(folder, max_num_batched_tokens=256)
    tokens = prompt(150)
    theirs = logits_of(model, tokens)
    req = Request.from_submit(Submit("r", tokens, SamplingParams(1, seed=0)), 0.0)
    req.blocks = engine.scheduler.pool.allocate(10) or []
    ends = [1, 2, 3, 17, 40, 64, 65, 129, 150]
    for start, end in zip([0, *ends], ends, strict=False):
        ours = engine._runner.run([Chunk(req, start, end - start, True)])[0][0]
        assert float((ours - theirs[end - 1]).abs().max()) < 1e-3
        whole = engine._runner.run([Chunk(req, 0, end, True)])[0][0]
        assert torch.equal(ours, whole), "bits depend on how the prompt was cut"
