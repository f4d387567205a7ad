"""Reading config.json: both spellings of transformers, defaults, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LLAMA3_ROPE

from kvrelay.paged_engine.model_config import MixtureOfExperts, ModelConfig, RopeScaling
from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.paged_engine.model_tensors import tensor_shapes
from kvrelay.wire.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
}
SCALING = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
LLAMA3 = {"rope_theta": 1e4, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)}
BIASES = {"attention_bias": True, "mlp_bias": True}
SLIDES = {"use_sliding_window": True, "sliding_window": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SHORT, LONG = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG}
READ_LONGROPE = RopeScaling(
    "longrope", 4.0, 1.0, 1.0, 128, short_factors=tuple(SHORT), long_factors=tuple(LONG)
)


def config_of(folder: Path, architecture: str = "Llama", **changes: Any) -> ModelConfig:
    """Write config.json (a change to ... removes the field) and read it."""
    values = LLAMA | {"architectures": [f"{architecture}ForCausalLM"]} | changes
    values = {key: value for key, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(str(folder))


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("Llama", {"eos_token_id": 7}, {"num_kv_heads": 4, "head_dim": 16, "rope_theta": 1e4}),
        ("Llama", {}, {"window": 0, "qkv_bias": False, "o_bias": False, "mlp_bias": False}),
        ("Llama", {"eos_token_id": [7, 8]}, {"eos_token_ids": (7, 8), "dtype": "bfloat16"}),
        ("Llama", {"torch_dtype": ..., "dtype": "float16"}, {"dtype": "float16"}),
        ("Llama", BIASES, {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": False}),
        ("Qwen2", {}, {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False}),
        ("Qwen3", {}, {"qkv_bias": False, "o_bias": False, "qk_norm": True}),
        ("Mistral", {"sliding_window": 24}, {"windows": (24,)}),
        ("Qwen2", SLIDES | {"use_sliding_window": False, "max_window_layers": 0}, {"window": 0}),
        ("Qwen3", SLIDES | {"max_window_layers": 0}, {"windows": (24,)}),
        ("Qwen2", SLIDES | {"max_window_layers": 2}, {"full_attention_layers": (0, 1)}),
        (
            "Qwen3",
            SLIDES | {"layer_types": ["sliding_attention", "full_attention"] * 2},
            {"full_attention_layers": (1, 3), "window": 24},
        ),
        (
            "Mixtral",
            {"num_local_experts": 8, "num_experts_per_tok": 2},
            {"window": 0} | {"moe": MixtureOfExperts(8, 2, 96, renormalize=True, dense_layers=())},
        ),
        ("Mixtral", {"sliding_window": 9}, {"windows": (9,)}),
        ("Qwen3Moe", EXPERTS, {"qk_norm": True, "moe": MixtureOfExperts(128, 8, 768, False, ())}),
        (
            "Qwen3Moe",
            EXPERTS | {"decoder_sparse_step": 3, "mlp_only_layers": [2], "norm_topk_prob": True},
            {"moe": MixtureOfExperts(128, 8, 768, True, (0, 1, 2, 3))},
        ),
        (
            "Gemma2",
            {"hidden_act": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0},
            {"window": 4096, "full_attention_layers": (1, 3), "gemma_norms": True}
            | {"activation": "gelu_tanh", "head_dim": 256}
            | {"embedding_scale": 8.0, "attention_scale": 1 / 16, "tie_embeddings": True}
            | {"attention_softcap": 50.0, "logit_softcap": None},
        ),
        ("Gemma2", {"attn_logit_softcapping": None}, {"attention_softcap": None}),
        (
            "Phi3",
            {"partial_rotary_factor": 0.75, "sliding_window": 2047},
            {"rotary_dim": 12, "windows": (2047,)},
        ),
        ("Llama", {"rope_parameters": LLAMA3_ROPE}, LLAMA3),
        ("Llama", {"rope_theta": 10_000, "rope_scaling": SCALING}, LLAMA3),
        (
            "Llama",
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_theta": 5e5, "rope_scaling": RopeScaling("linear", 4.0, 1.0, 1.0, 512)},
        ),
        (
            "Llama",
            {"rope_scaling": YARN | {"beta_fast": 16}},
            {"rope_scaling": RopeScaling("yarn", 4.0, 1.0, 1.0, 128, 16.0, 1.0)},
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "su", "original_max_position_embeddings": 128} | LONGROPE},
            {"rope_scaling": READ_LONGROPE},
        ),
        (
            "Llama",
            {
                "original_max_position_embeddings": 128,
                "rope_scaling": {"type": "longrope"} | LONGROPE,
            },
            {"rope_scaling": READ_LONGROPE},
        ),
        # The limit is that of the extended context; some files hold it already.
        ("Llama", {"rope_scaling": YARN}, {"max_position": 512}),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, {"max_position": 2048}),
    ],
)
def test_fields_are_read_as_transformers_reads_them(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_of(tmp_path, architecture, **changes)
    assert {name: getattr(config, name) for name in expected} == expected


def test_gemma3_is_read_as_the_hub_spells_it(tmp_path: Path) -> None:
    """Checkpoints of 2025 keep what is not the default's in text_config, with rope_scaling."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(str(tmp_path))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.rope_theta, config.local_rope_theta, config.max_position) == (1e6, 1e4, 131_072)
    assert config.rope_scaling == RopeScaling("linear", 8.0, 1.0, 1.0, 131_072)
    assert config.full_attention_layers == (5, 11, 17, 23, 29)
    assert (config.windows, config.dtype, config.eos_token_ids) == ((0, 1024), "bfloat16", (1, 106))
    assert "language_model.model.layers.33.self_attn.q_norm.weight" in tensor_shapes(config)


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert config_of(tmp_path, eos_token_id=7).eos_token_ids == (3, 4)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_scaling": values}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("GPT2LMHead", {}, "'GPT2LMHeadForCausalLM' is not supported; LlamaForCausalLM, Mistral"),
        ("", {"architectures": ...}, "architecture None is not supported"),
        ("OPT", {}, "architecture 'OPTForCausalLM' is not supported"),
        ("Llama", rope(rope_type="odd", factor=4.0), "rope scaling 'odd' is not supported; linear"),
        ("Llama", rope(rope_type="linear"), "rope has no factor"),
        ("Llama", rope(rope_type="linear", factor=0), "positive factor"),
        ("Llama", rope(type="longrope", short_factor=[1.0] * 8), "two lists .* got 8 and 0"),
        ("Llama", rope(type="su", short_factor=[1.0], long_factor=[2.0]), "1 factors, .* 8 freq"),
        ("Llama", rope(type="su", short_factor=["1"], long_factor=[2.0]), "a list of numbers"),
        ("Llama", rope(rope_type="llama3", factor=4.0), "no low_freq_factor"),
        ("Llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat object"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("Llama", {"hidden_size": ...}, "has no hidden_size"),
        ("Llama", {"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ("Llama", {"num_hidden_layers": 0}, "num_layers must be positive, got 0"),
        ("Llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ("Llama", {"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ("Llama", {"eos_token_id": ["</s>"]}, "eos_token_id must be a list of whole numbers"),
        ("Qwen2", SLIDES | {"layer_types": "full_attention"}, "name the kinds of 4 layers"),
        ("Qwen2", SLIDES | {"layer_types": ["chunked"] * 4}, "layer_types 'chunked' is not"),
        ("Gemma2", {"hidden_activation": "gelu"}, "hidden_act 'gelu' is not .*; silu"),
        ("Gemma2", {"attn_logit_softcapping": 0}, "attention_softcap must be positive, got 0"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        (
            "",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "text_config must be an object",
        ),
        ("Qwen3Moe", EXPERTS | {"num_experts": 4}, "to 8 of 4 experts"),
        ("Phi3", {"partial_rotary_factor": 0.7}, "partial_rotary_factor 0.7 rotates 11 of 16"),
        ("Phi3", {"partial_rotary_factor": 0.75, "head_dim": 17}, "12 of 17 elements of a head"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, architecture, **changes)


def test_a_missing_or_broken_model_is_refused_with_a_remedy(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_model_config(str(path))

    refused(tmp_path / "nowhere", "does not exist; pass a folder")
    refused(tmp_path, "holds no config.json")
    (tmp_path / "config.json").write_text("{broken")
    refused(tmp_path, "cannot be read as JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "must hold a JSON object, got list")
    refused(tmp_path / "config.json", "holds no weights; pass its folder")


def test_the_served_name_is_the_folders_the_repositorys_or_the_files(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--Some-Model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert config_of(snapshot).name == "Some-Model"
    (tmp_path / "llama-8b.json").write_text(json.dumps(LLAMA))
    assert read_model_config(str(tmp_path / "llama-8b.json"), "dummy").name == "llama-8b"
    assert config_of(tmp_path).name == tmp_path.name
