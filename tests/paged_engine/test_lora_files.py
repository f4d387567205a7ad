"""Adapters on disk: what is read, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter
from tiny_models import make_tiny

from kvrelay.paged_engine.lora_files import Adapter, read_adapter
from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.wire.errors import ConfigError

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny("LlamaForCausalLM", folder)
    return folder


def read(adapter: Path, base: Path, max_rank: int = 16) -> Adapter:
    return read_adapter(str(adapter), read_model_config(str(base)), max_rank)


def test_matrices_by_our_names_with_the_scale_in_b(base, tmp_path):
    folder = make_adapter(tmp_path / "a", base, seed=1, rank=4, alpha=6)
    adapter = read(folder, base)
    assert len(adapter.modules) == 3 * 7
    a, b = adapter.modules["model.layers.2.mlp.down_proj"]
    stored = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
    assert torch.equal(a, stored[key.format("A")])
    assert torch.equal(b, stored[key.format("B")] * 1.5)
    assert adapter.rank == 4


def test_scales_are_rank_stabilized_and_by_pattern(base, tmp_path):
    """Of rank 4 and alpha 8: 8 / sqrt(4)."""
    scaled = {"use_rslora": True, "alpha_pattern": {"q_proj": 8}}
    folder = make_adapter(tmp_path / "a", base, seed=4, alpha=6, targets=("q_proj",), **scaled)
    _, b = read(folder, base).modules["model.layers.0.self_attn.q_proj"]
    stored = load_file(folder / "adapter_model.safetensors")
    assert torch.equal(b, stored[f"{MODULE}.lora_B.weight"] * 4)


def test_the_digest_is_of_the_content(base, tmp_path):
    one = make_adapter(tmp_path / "one", base, seed=1)
    same = make_adapter(tmp_path / "same", base, seed=1, target_modules="all-linear")
    other = make_adapter(tmp_path / "other", base, seed=1, alpha=16.0)
    another = make_adapter(tmp_path / "another", base, seed=2)
    digests = [read(folder, base).digest for folder in (one, same, other, another)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_digest_is_that_of_earlier_releases(base, tmp_path):
    """It travels in tickets between releases."""
    scaled = {"use_rslora": True, "alpha_pattern": {"q_proj": 8}}
    folder = make_adapter(tmp_path / "a", base, seed=1, targets=("q_proj",), **scaled)
    path = folder / "adapter_model.safetensors"
    save_file({name: torch.ones_like(each) for name, each in load_file(path).items()}, path)
    assert read(folder, base).digest == "8a01d814f490ea48245340cf6a81d254"


@pytest.mark.parametrize("depth", [950, 100_000])
def test_a_config_that_is_nested_too_deeply_is_refused(base, tmp_path, depth):
    folder = make_adapter(tmp_path / "a", base, seed=1)
    config = '{"peft_type": "LORA", "r": 4, "lora_alpha": 1, "rank_pattern": '
    (folder / "adapter_config.json").write_text(config + "[" * depth + "]" * depth + "}")
    with pytest.raises(ConfigError):
        read(folder, base)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"trainable_token_indices": [3]}, "embeddings"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 0}, "r must be a positive number"),
        ({"r": 8}, "says 8"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"alpha_pattern": {".*": "8"}}, "cannot be read"),
    ],
)
def test_what_is_not_served_is_refused_by_name(base, tmp_path, fields, words):
    with pytest.raises(ConfigError, match=words):
        read(make_adapter(tmp_path / "a", base, seed=1, **fields), base)


def test_files_that_are_missing_or_pickled(base, tmp_path):
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        read(tmp_path / "none", base)
    for path in ("~nobody-at-all", "x" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
            read(Path(path), base)
    folder = make_adapter(tmp_path / "a", base, seed=1)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="could run code"):
        read(folder, base)
    (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}{}{}{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(folder, base)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        read(folder, base)


def test_ranks_above_the_limit(base, tmp_path):
    folder = make_adapter(tmp_path / "a", base, seed=1, rank=8)
    with pytest.raises(ConfigError, match="rank 8 and max_lora_rank is 4"):
        read(folder, base, 4)


LM_HEAD = "base_model.model.lm_head.lora_"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{MODULE}.lora_A.weight": (4, 32)}, r"\(4, 32\).*someone/tiny"),
        ({f"{MODULE}.lora_magnitude_vector.weight": (4, 64)}, "vector.weight, which is none"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 64)}, "A, which is none"),
        ({f"{LM_HEAD}A.weight": (4, 64)}, "only lora_A"),
        ({f"{LM_HEAD}A.weight": (4, 64), f"{LM_HEAD}B.weight": (256, 4)}, "lm_head"),
    ],
)
def test_tensors_that_the_model_has_no_place_for_are_refused_by_name(
    base, tmp_path, changes, words
):
    folder = make_adapter(tmp_path / "a", base, seed=1)
    path = folder / "adapter_model.safetensors"
    changed = {name: torch.zeros(shape) for name, shape in changes.items()}
    save_file(load_file(path) | changed, path)
    with pytest.raises(ConfigError, match=words):
        read(folder, base)


def test_a_mixtures_experts_are_refused_and_its_attention_is_served(tmp_path):
    make_tiny("MixtralForCausalLM", tmp_path / "base")
    experts = make_adapter(tmp_path / "e", tmp_path / "base", seed=1, targets=("w1",))
    with pytest.raises(ConfigError, match="experts"):
        read(experts, tmp_path / "base")
    attention = make_adapter(
        tmp_path / "a", tmp_path / "base", seed=1, targets=("q_proj", "o_proj")
    )
    assert len(read(attention, tmp_path / "base").modules) == 6
