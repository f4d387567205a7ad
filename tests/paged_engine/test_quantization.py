"""fp8 checkpoints in the layouts of the field: read as they are stored, de-quantized exactly,
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from kvrelay.kernels.decoder_layer import dequantize
from kvrelay.paged_engine.model_config import ModelConfig, Quantization
from kvrelay.paged_engine.model_files import read_model_config, read_tensors
from kvrelay.paged_engine.model_tensors import (
    quantized_weights,
    stored_weights,
    tensor_shapes,
    weight_shapes,
)
from kvrelay.paged_engine.quantization import dequantized
from kvrelay.wire.errors import ConfigError

FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


def compressed(
    weights: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "input_activations": fp8 | {"strategy": "token", "dynamic": True} | (inputs or {}),
        "output_activations": None,
        "targets": changes.pop("targets", ["Linear"]),
        "weights": fp8 | {"strategy": "channel", "dynamic": False} | (weights or {}),
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        **changes,
    }


def in_blocks(**changes: Any) -> dict[str, Any]:
    """A quantization_config as Qwen writes it."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 32],
        "modules_to_not_convert": ["lm_head"],
        "fmt": "e4m3",
        **changes,
    }


def by_channel(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(FP8), {f"{name}_scale": scale}


def by_block(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Blocks of 16 rows and 32 columns, written as loops so that they are not our own code again."""
    scale = torch.empty(-(-weight.shape[0] // 16), -(-weight.shape[1] // 32))
    stored = torch.empty(weight.shape, dtype=FP8)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = (slice(16 * row, 16 * row + 16), slice(32 * column, 32 * column + 32))
            scale[row, column] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scale[row, column]).to(FP8)
    return stored, {f"{name}_scale_inv": scale}


def real(weight: torch.Tensor, extra: Tensors) -> torch.Tensor:
    """What a stored weight stands for, element by element in fp64."""
    scale = next(iter(extra.values())).double()
    if scale.ndim == 2 and scale.shape[1] > 1:
        rows = torch.arange(weight.shape[0])[:, None] // 16
        columns = torch.arange(weight.shape[1])[None] // 32
        return weight.double() * scale[rows, columns]
    return weight.double() * scale


def say(folder: Path, changes: dict[str, Any]) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def make_fp8(
    folder: Path,
    quantization: dict[str, Any],
    store: Callable[[str, torch.Tensor], tuple[torch.Tensor, Tensors]],
    *,
    architecture: str = "LlamaForCausalLM",
    plain: tuple[str, ...] = ("lm_head",),
    **config: Any,
) -> Tensors:
    """Write a tiny fp8 checkpoint; the real values of all its tensors, fp64 where they were
    quantized.

    `plain` are the modules that are not quantized.
    """
    make_tiny(architecture, folder, dtype="bfloat16", **config)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and "embed" not in name and module not in plain:
            weight, extra = store(name, tensor.float())
            stored |= {name: weight} | extra
            meant[name] = real(weight, extra)
        else:
            stored[name] = meant[name] = tensor.to(torch.bfloat16)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    say(folder, {"quantization_config": quantization, "dtype": "bfloat16"})
    return meant


def read(folder: Path) -> tuple[ModelConfig, Tensors]:
    config = read_model_config(str(folder))
    return config, dict(read_tensors(str(folder), config))


def test_weights_by_channel_stay_fp8_with_a_scale_for_each_row(tmp_path: Path) -> None:
    meant = make_fp8(tmp_path, compressed(), by_channel, intermediate_size=97)
    config, tensors = read(tmp_path)
    assert config.dtype == "bfloat16"
    assert read_model_config(str(tmp_path), "dummy").quantization is None
    assert tensors.keys() == tensor_shapes(config).keys()
    fp8_names = quantized_weights(config)
    assert fp8_names == {name for name in meant if "_proj" in name}
    for name, tensor in tensors.items():
        if name in fp8_names:
            scale = tensors[f"{name}_scale"]
            assert (tensor.dtype, scale.dtype, scale.shape) == (
                FP8,
                torch.float32,
                tensor.shape[:1],
            )
            assert torch.equal(dequantize(tensor, scale, torch.float32), meant[name].float())
            assert torch.equal(
                dequantize(tensor, scale, torch.bfloat16), meant[name].float().bfloat16()
            )
        elif not name.endswith("_scale"):
            assert torch.equal(tensor, meant[name])


def test_weights_by_block_are_plain_ones_once_they_are_read(tmp_path: Path) -> None:
    # 97 and 90 are no whole blocks.
    meant = make_fp8(
        tmp_path, in_blocks(), by_block, intermediate_size=97, head_dim=18, rope_parameters=None
    )
    config, tensors = read(tmp_path)
    assert tensors.keys() == meant.keys() == tensor_shapes(config).keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, meant[name].float().bfloat16()), name


def shuffled(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return them in an order that files may have."""
    items = list(tensors)
    return [
        items[i] for i in torch.randperm(len(items), generator=torch.Generator().manual_seed(0))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_without_fp8_gets_the_same_model_without_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    meant = make_fp8(tmp_path, compressed(), by_channel)
    config = read_model_config(str(tmp_path))
    stored = shuffled(read_tensors(str(tmp_path), config))
    tensors, plain = dequantized(stored, config, dtype)
    assert plain == replace(config, quantization=None)
    found = dict(tensors)
    assert found.keys() == tensor_shapes(plain).keys() == meant.keys()
    for name, tensor in found.items():
        assert torch.equal(
            tensor.float(),
            meant[name].float().to(dtype if "_proj" in name else torch.bfloat16).float(),
        )


def test_scales_of_a_tensor_that_holds_several_projections_are_cut_as_its_rows_are(
    tmp_path: Path,
) -> None:
    make_tiny("Phi3ForCausalLM", tmp_path)
    say(tmp_path, {"quantization_config": compressed()})
    config = read_model_config(str(tmp_path))
    fused = "model.layers.0.self_attn.qkv_proj.weight_scale"
    assert tensor_shapes(config)[fused] == (128,)
    ours = [f"model.layers.0.self_attn.{letter}_proj.weight_scale" for letter in "qkv"]
    assert stored_weights(config)[fused] == tuple(ours)
    assert [weight_shapes(config)[name] for name in ours] == [(64,), (32,), (32,)]


def test_an_output_layer_in_fp8_becomes_a_plain_one(tmp_path: Path) -> None:
    meant = make_fp8(tmp_path, compressed(ignore=[]), by_channel, plain=())
    config, tensors = read(tmp_path)
    assert "lm_head.weight" in quantized_weights(config)
    assert torch.equal(tensors["lm_head.weight"], meant["lm_head.weight"].float().bfloat16())
    assert "lm_head.weight_scale" not in tensors
    assert "model.layers.0.mlp.up_proj.weight_scale" in tensors


def test_experts_in_fp8_become_plain_ones(tmp_path: Path) -> None:
    said = compressed(ignore=["lm_head", r"re:.*block_sparse_moe\.gate$"])
    routers = tuple(f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(3))
    meant = make_fp8(
        tmp_path, said, by_channel, architecture="MixtralForCausalLM", plain=("lm_head", *routers)
    )
    config, tensors = read(tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert expert in quantized_weights(config)
    assert torch.equal(tensors[expert], meant[expert].float().bfloat16())
    assert tensors["model.layers.1.self_attn.q_proj.weight"].dtype == FP8
    assert tensors[f"{routers[0]}.weight"].dtype == torch.bfloat16


def test_names_are_matched_as_a_whole_at_dots() -> None:
    quantization = Quantization(("mlp.gate", "model.layers.1", "re:.*o_proj"))
    covered = ["model.layers.10.mlp.up_proj", "model.layers.0.mlp.gate_proj", "lm_head"]
    ignored = [
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.up_proj",
        "model.layers.7.self_attn.o_proj",
    ]
    assert [quantization.covers(name) for name in covered + ignored] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"quantization_config \(gptq\) is not supported; compressed-tensors",
        ),
        ({"bits": 4}, r"quantization_config \(unknown\) is not supported"),
        ("fp8", "quantization_config must be an object"),
        (compressed(format="pack-quantized"), "format 'pack-quantized' is not supported; 'float-"),
        (compressed({"type": "int"}), "weights: type 'int' is not supported; 'float' is"),
        (compressed({"num_bits": 4}), "num_bits 4 is not supported; 8 is"),
        (compressed({"strategy": "tensor"}), "strategy 'tensor' is not supported; 'channel' is"),
        (compressed({"symmetric": False}), "symmetric False"),
        (compressed(inputs={"dynamic": False}), "input_activations: dynamic False"),
        (compressed(targets=["re:.*mlp.*"]), "targets"),
        (compressed(config_groups={}), "must be one group, got 0"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format"),
        (compressed(transform_config={"config_groups": {}}), "transform_config"),
        (compressed(ignore="lm_head"), "ignore must be a list of strings"),
        (in_blocks(activation_scheme="static"), "activation_scheme 'static' is not supported"),
        (in_blocks(weight_block_size=None), r"two sizes, got \[\]; one scale per tensor is not"),
        (in_blocks(weight_block_size=[128]), r"weight_block_size must be two sizes, got \[128\]"),
    ],
)
def test_what_is_not_fp8_or_of_another_kind_is_refused_by_name(
    tmp_path: Path, said: Any, message: str
) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    say(tmp_path, {"quantization_config": said})
    with pytest.raises(ConfigError, match=message):
        read_model_config(str(tmp_path))


def test_a_checkpoint_that_is_not_what_its_config_says_is_refused(tmp_path: Path) -> None:
    make_fp8(tmp_path, compressed(), by_channel)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"

    def refused(tensors: Tensors, message: str) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            read(tmp_path)

    refused(
        {key: value for key, value in stored.items() if key != f"{name}_scale"},
        f"lacks tensor {name}_scale",
    )
    refused(
        stored | {"lm_head.weight_scale": torch.ones(1)},
        "holds unknown tensor lm_head.weight_scale",
    )
    refused(
        stored | {name: stored[name].bfloat16()},
        f"{name} is torch.bfloat16, the config says torch.float8_e4m3fn",
    )
    refused(
        stored | {name: stored[name].to(torch.float8_e5m2)},
        f"{name} is torch.float8_e5m2, the config says",
    )
    refused(
        stored | {f"{name}_scale": torch.ones(3)},
        rf"{name}_scale is \(3,\); for a weight \[96, 64\] it must be \[96, 1\]",
    )
    refused(
        stored | {"model.norm.weight": stored["model.norm.weight"].to(FP8)},
        "norm.weight is float8_e4m3fn; float32",
    )
    refused(
        stored | {name: stored[name][:5].contiguous()},
        rf"{name} is \(5, 64\), the config says \(96, 64\)",
    )
