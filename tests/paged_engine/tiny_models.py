"""Tiny random models in Hugging Face layout, one per architecture, for comparison with
transformers' own code.
"""

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
# Frequencies of head_dim 16 with 64 original tokens: one is kept, two are blended, five are divided
# by the factor.
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
# Those whose checkpoints spell names and fields in their own way. Windows are shorter than the
# tests' prompts, and soft caps so low that they bend.
_GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 24, "sliding_window": 12, "pad_token_id": 0}
FURTHER_DIFFERENCES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "Gemma2ForCausalLM": _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": _GEMMA
    | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "Phi3ForCausalLM": {
        "pad_token_id": 0,
        "sliding_window": 50,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
}
FURTHER_DIFFERENCES["Gemma3ForConditionalGeneration"] = FURTHER_DIFFERENCES["Gemma3ForCausalLM"]
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def make_tiny(architecture: str, folder: Path, **overrides: Any) -> transformers.PreTrainedModel:
    """Write a tiny fp32 model to `folder` and return it, in eval mode. `overrides` are fields of
    its config.

    Weights are a function of architecture-independent parameter names, large enough that every part
    of the model moves the logits: norms around 1, biases far from 0.
    """
    config = _config(
        architecture, {**SIZES, **(DIFFERENCES | FURTHER_DIFFERENCES)[architecture], **overrides}
    )
    model = getattr(transformers, architecture)(config)
    # The default of transformers 5.17, sdpa, leaves out the soft cap of Gemma 2 without a word.
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                _random(
                    name, parameter.shape, norm=0.0 if architecture.startswith("Gemma") else 1.0
                )
            )
    model.save_pretrained(folder)
    return model.eval()


def _config(architecture: str, values: dict[str, Any]) -> transformers.PreTrainedConfig:
    if architecture == "Gemma3ForConditionalGeneration":
        # The tests' token ids end at 255; none of them is an image's.
        return transformers.Gemma3Config(
            text_config=values,
            vision_config=_VISION,
            mm_tokens_per_image=4,
            image_token_index=300,
            dtype="float32",
        )
    name = (
        "Gemma3TextConfig"
        if architecture == "Gemma3ForCausalLM"
        else architecture.replace("ForCausalLM", "Config")
    )
    return getattr(transformers, name)(**values)


def _random(name: str, shape: torch.Size, norm: float) -> torch.Tensor:
    """`norm`: what weights of norms lie around."""
    seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if name.endswith("norm.weight"):
        return norm + 0.3 * values
    if name.endswith("bias") or "embed_tokens" in name:
        return 0.5 * values
    return values / shape[-1] ** 0.5
