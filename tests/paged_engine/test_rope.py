"""Rotary frequencies: equal to those of transformers for every scaling, and fixed for a whole
context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.paged_engine.rope import rope_frequencies, rope_variant

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.01 * i for i in range(48)],
    "long_factor": [1.0 + 1.3 * i for i in range(48)],
}
PHI3 = {"hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131_072}
# Name: (rope values, other fields of the config).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"rope_type": "default"}, {}),
    "linear": ({"rope_type": "linear", "factor": 8.0}, {}),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"max_position_embeddings": 131_072},
    ),
    "yarn of Qwen": (
        YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 32_768},
        {"head_dim": 128},
    ),
    "yarn with an attention factor": (YARN | {"attention_factor": 0.7}, {}),
    "yarn with betas": (YARN | {"beta_fast": 40.0, "beta_slow": 3.0}, {}),
    "yarn that keeps all": (YARN | {"original_max_position_embeddings": 1 << 30}, {}),
    "yarn without a factor": (YARN | {"factor": None}, {"max_position_embeddings": 65_536}),
    "longrope of Phi-3": (LONGROPE, PHI3),
    "longrope with a factor": (LONGROPE | {"factor": 3.0, "attention_factor": 1.25}, PHI3),
    "longrope that is not longer": (LONGROPE, PHI3 | {"max_position_embeddings": 4096}),
    "part of the head": (
        {"rope_type": "default", "partial_rotary_factor": 0.75},
        {"model_type": "phi3"},
    ),
}


def config_of(case: str) -> transformers.PretrainedConfig:
    rope, fields = CASES[case]
    fields = {"max_position_embeddings": 16_384, "pad_token_id": 0} | fields
    family = "Phi3" if fields.pop("model_type", "llama") == "phi3" else "Llama"
    return getattr(transformers, f"{family}Config")(
        rope_parameters={"rope_theta": 10_000.0} | rope,
        architectures=[f"{family}ForCausalLM"],
        **fields,
    )


def theirs_for(config: transformers.PretrainedConfig, length: int) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        of_family = (
            Phi3RotaryEmbedding
            if isinstance(config, transformers.Phi3Config)
            else LlamaRotaryEmbedding
        )
        return of_family.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)


@pytest.mark.parametrize("length", [2048, 4096, 4097, 16_384, 50_000, 131_072])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers_at_the_nodes_limit(
    tmp_path: Path, case: str, length: int
) -> None:
    theirs = config_of(case)
    theirs.save_pretrained(tmp_path)
    config = read_model_config(str(tmp_path), "dummy")
    frequencies, attention_factor = rope_frequencies(
        config.rope_scaling, config.rope_theta, config.rotary_dim, length
    )
    expected, expected_factor = theirs_for(theirs, length)
    assert frequencies.dtype == torch.float32
    assert frequencies.shape == expected.shape == (config.rotary_dim // 2,)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(expected_factor, rel=1e-12)


def test_only_longrope_depends_on_the_nodes_limit_and_says_so(tmp_path: Path) -> None:
    for case in CASES:
        config_of(case).save_pretrained(tmp_path)
        config = read_model_config(str(tmp_path), "dummy")
        variants: dict[str, list[torch.Tensor]] = {}
        for length in (2048, 16_384, 16_385, 50_000):
            frequencies, _ = rope_frequencies(
                config.rope_scaling, config.rope_theta, config.rotary_dim, length
            )
            variants.setdefault(rope_variant(config.rope_scaling, length), []).append(frequencies)
        assert all(torch.equal(group[0], other) for group in variants.values() for other in group)
        assert len(variants) == (2 if case.startswith("longrope") else 1)
