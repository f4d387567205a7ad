"""Reading config.json: both spellings of transformers, defaults, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import DIFFERENCES, LLAMA3_ROPE, make_tiny

from kvrelay.paged_engine.model_config import RopeScaling
from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.paged_engine.model_tensors import tensor_shapes
from kvrelay.wire.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
}


def config_of(folder: Path, **changes: Any):
    """Write config.json (a change to ... removes the field) and read it."""
    values = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(str(folder))


def test_a_llama_config_gives_its_sizes_and_transformers_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    config = config_of(folder, eos_token_id=7)
    assert (config.architecture, config.name, config.dtype) == (
        "LlamaForCausalLM",
        "Tiny-Llama",
        "bfloat16",
    )
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (
        64,
        4,
        4,
        2,
    )
    assert (config.head_dim, config.rope_theta, config.rope_scaling, config.window) == (
        16,
        10_000.0,
        None,
        0,
    )
    assert (
        config.tie_embeddings,
        config.qkv_bias,
        config.o_bias,
        config.mlp_bias,
        config.qk_norm,
    ) == (False,) * 5
    assert config.eos_token_ids == (7,)


def test_missing_and_null_fields_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    assert config_of(tmp_path, num_key_value_heads=...).num_kv_heads == 4
    assert config_of(tmp_path, num_key_value_heads=None, head_dim=None).head_dim == 16
    assert (
        config_of(tmp_path, architectures=..., model_type="qwen2").architecture
        == "Qwen2ForCausalLM"
    )
    assert config_of(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert config_of(tmp_path, torch_dtype=...).dtype == "float32"
    assert config_of(tmp_path, torch_dtype=..., dtype="float16").dtype == "float16"


def test_rope_is_read_in_the_old_and_the_new_spelling(tmp_path: Path) -> None:
    scaling = {
        key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_theta", "rope_type")
    }
    new = config_of(tmp_path, rope_parameters=LLAMA3_ROPE)
    old = config_of(tmp_path, rope_theta=10_000, rope_scaling={"rope_type": "llama3", **scaling})
    assert new.rope_scaling == old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert new.rope_theta == old.rope_theta == 10_000.0
    linear = config_of(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4})
    assert (linear.rope_theta, linear.rope_scaling) == (
        5e5,
        RopeScaling("linear", 4.0, 1.0, 1.0, 512),
    )


def test_every_rope_scaling_is_read_with_its_defaults(tmp_path: Path) -> None:
    def scaling(**values: Any) -> RopeScaling | None:
        return config_of(tmp_path, rope_scaling=values).rope_scaling

    assert scaling(rope_type="dynamic", factor=2.0) == RopeScaling("dynamic", 2.0, 1.0, 1.0, 512)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert scaling(**yarn) == RopeScaling(
        "yarn", 4.0, 1.0, 1.0, 128, 32.0, 1.0, True, None, 0.0, 0.0
    )
    more = {
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.5,
        "mscale": 1,
        "mscale_all_dim": 0.7,
    }
    assert scaling(**yarn, **more) == RopeScaling(
        "yarn", 4.0, 1.0, 1.0, 128, 16.0, 2.0, False, 1.5, 1.0, 0.7
    )
    short, long = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]
    longrope = {"short_factor": short, "long_factor": long}
    expected = RopeScaling(
        "longrope", 4.0, 1.0, 1.0, 128, short_factors=tuple(short), long_factors=tuple(long)
    )
    assert scaling(type="su", original_max_position_embeddings=128, **longrope) == expected
    outside = config_of(
        tmp_path,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", **longrope},
    )
    assert outside.rope_scaling == expected


def test_the_limit_is_that_of_the_extended_context(tmp_path: Path) -> None:
    def limit(**values: Any) -> int:
        return config_of(tmp_path, rope_scaling=values).max_position

    assert limit(rope_type="dynamic", factor=2.5) == 1280
    assert limit(rope_type="yarn", factor=4.0) == 2048
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=256) == 1024
    # Files that hold the extended length already.
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=128) == 512
    assert limit(rope_type="llama3", factor=4.0, low_freq_factor=1, high_freq_factor=4) == 512


def test_each_architecture_declares_its_differences(tmp_path: Path) -> None:
    llama = config_of(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (
        True,
        True,
        True,
        False,
    )
    qwen2 = config_of(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=True)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (
        True,
        False,
        False,
        False,
    )
    qwen3 = config_of(tmp_path, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (
        False,
        False,
        False,
        True,
    )
    assert qwen3.tie_embeddings
    assert "lm_head.weight" not in tensor_shapes(qwen3)


def test_mistral_has_the_window_it_names_none_for_null_and_4096_by_default(tmp_path: Path) -> None:
    windows = [
        config_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=value).window
        for value in (24, None, ...)
    ]
    assert windows == [24, 0, 4096]


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_has_a_window_in_the_layers_that_the_config_names(
    tmp_path: Path, architecture: str
) -> None:
    def windows(**changes: Any) -> list[int]:
        config = config_of(tmp_path, architectures=[architecture], sliding_window=24, **changes)
        return [config.layer_window(layer) for layer in range(4)]

    assert windows(use_sliding_window=False, max_window_layers=0) == [0] * 4
    assert windows(use_sliding_window=True, max_window_layers=4) == [0] * 4
    assert windows(use_sliding_window=True, max_window_layers=0) == [24] * 4
    assert windows(use_sliding_window=True, max_window_layers=2) == [0, 0, 24, 24]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(use_sliding_window=True, layer_types=kinds) == [24, 0, 24, 0]
    for wrong in (kinds[:3], "sliding_attention"):
        with pytest.raises(ConfigError, match="layer_types must name the kinds of 4 layers"):
            windows(use_sliding_window=True, layer_types=wrong)
    with pytest.raises(ConfigError, match="layer_types 'chunked_attention' is not supported"):
        windows(use_sliding_window=True, layer_types=["chunked_attention"] * 4)


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert config_of(tmp_path, eos_token_id=7).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text("{}")
    assert config_of(tmp_path, eos_token_id=[7, 8]).eos_token_ids == (7, 8)
    assert config_of(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize("architecture", DIFFERENCES)
def test_a_config_written_by_transformers_is_read_alike(tmp_path: Path, architecture: str) -> None:
    theirs = make_tiny(architecture, tmp_path).config
    ours = read_model_config(str(tmp_path))
    assert ours.architecture == architecture
    assert (ours.vocab_size, ours.num_layers, ours.intermediate_size) == (256, 3, 96)
    assert (ours.head_dim, ours.rms_norm_eps, ours.max_position) == (16, theirs.rms_norm_eps, 512)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.rope_scaling is not None) == (architecture == "LlamaForCausalLM")
    assert ours.window == (12 if architecture == "MistralForCausalLM" else 0)
    assert (ours.dtype, ours.eos_token_ids) == ("float32", (2,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; LlamaForCausalLM, Mistral",
        ),
        ({"architectures": ..., "model_type": "bert"}, "architecture 'bert' is not supported"),
        ({"architectures": ...}, "has no model_type"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"quantization_config \(gptq\) is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "odd", "factor": 4.0}},
            "rope scaling 'odd' is not supported; linear, dyn",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}}, "rope has no factor"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}},
            "beta_slow < beta_fast",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "positive factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}},
            "two lists .* got 8 and 0",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
            "1 factors, .* 8 frequencies",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": ["1"], "long_factor": [2.0]}},
            "must be a list of numbers",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "no low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": ...}, "has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ({"num_hidden_layers": 0}, "num_layers must be positive, got 0"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head_dim must be even.*15"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id must be a whole number or a list"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, **changes)


def test_a_missing_or_broken_model_is_refused_with_a_remedy(tmp_path: Path) -> None:
    def refused(path: Path, message: str, load_format: str = "auto") -> None:
        with pytest.raises(ConfigError, match=message):
            read_model_config(str(path), load_format)

    refused(tmp_path / "nowhere", "does not exist; pass a folder")
    refused(tmp_path, "holds no config.json")
    refused(tmp_path, "is a folder; load_format gguf does not read it", "gguf")
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
