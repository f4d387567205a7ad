"""Tiny random models in Hugging Face layout, one per architecture, for comparison with transformers' own code."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
# Frequencies of head_dim 16 with 64 original tokens: one is kept, two are blended, five are divided by the factor.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DIFFERENCES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE},
    "MistralForCausalLM": {"sliding_window": 12},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
}


def make_tiny(architecture: str, folder: Path, **overrides: Any) -> transformers.PreTrainedModel:
    """Write a tiny fp32 model to `folder` and return it, in eval mode. `overrides` are fields of its config.

    Weights are a function of architecture-independent parameter names, large enough that every part of the model moves
    the logits: norms around 1, biases far from 0.
    """
    values = {**SIZES, **DIFFERENCES[architecture], **overrides}
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**values)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter.shape))
    model.save_pretrained(folder)
    return model.eval()


def _random(name: str, shape: torch.Size) -> torch.Tensor:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if name.endswith("norm.weight"):
        return 1 + 0.3 * values
    if name.endswith("bias") or "embed_tokens" in name:
        return 0.5 * values
    return values / shape[-1] ** 0.5
