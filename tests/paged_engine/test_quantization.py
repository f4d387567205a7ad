"""fp8 checkpoints in the layouts of the field: read as they are stored, de-quantized exactly,
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from kvrelay.kernels.elementwise import dequantize
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
    strategy: str = "channel",
    inputs: dict[str, Any] | None = {  # noqa: B006
        "num_bits": 8,
        "type": "float",
        "strategy": "token",
        "dynamic": True,
    },
    **changes: Any,
) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    weights = {
        "actorder": None,
        "block_structure": [16, 32] if strategy == "block" else None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
    }
    weights |= changes.pop("weights", {})
    group = {
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **changes,
    }


STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def fp8(**changes: Any) -> dict[str, Any]:
    """A quantization_config as AutoFP8 and, with blocks, Qwen write it."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
        **changes,
    }


def by_tensor(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(FP8), {f"{name}_scale": scale.reshape(1)}


def by_channel(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(FP8), {f"{name}_scale": scale}


def by_block(suffix: str) -> Callable[[str, torch.Tensor], tuple[torch.Tensor, Tensors]]:
    def store(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Blocks of 16 rows and 32 columns, written as loops so that they are not our own code
        again.
        """
        scale = torch.empty(-(-weight.shape[0] // 16), -(-weight.shape[1] // 32))
        stored = torch.empty(weight.shape, dtype=FP8)
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                part = (slice(16 * row, 16 * row + 16), slice(32 * column, 32 * column + 32))
                scale[row, column] = weight[part].abs().max() / 448
                stored[part] = (weight[part] / scale[row, column]).to(FP8)
        return stored, {f"{name}{suffix}": scale}

    return store


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
    more: Callable[[str], Tensors] = lambda module: {},
    key: str = "quantization_config",
    plain: tuple[str, ...] = ("lm_head",),
    **config: Any,
) -> Tensors:
    """Write a tiny fp8 checkpoint; the real values of all its tensors, fp64 where they were
    quantized.

    `more` gives other tensors of a quantized module, `plain` are the modules that are not
    quantized.
    """
    make_tiny(architecture, folder, dtype="bfloat16", **config)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and "embed" not in name and module not in plain:
            weight, extra = store(name, tensor.float())
            stored |= {name: weight} | extra | more(module)
            meant[name] = real(weight, extra)
        else:
            stored[name] = meant[name] = tensor.to(torch.bfloat16)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    say(folder, {key: quantization, "dtype": "bfloat16"})
    return meant


def input_scales(name: str) -> Callable[[str], Tensors]:
    return lambda module: {f"{module}.{name}": torch.tensor(0.02)}


def kv_scales(module: str) -> Tensors:
    """Those of all makers at once."""
    if not module.endswith((".k_proj", ".v_proj")):
        return {}
    attention, letter = module.rsplit(".", 1)[0], module[-6]
    names = (f"{module}.output_scale", f"{module}.{letter}_scale", f"{attention}.{letter}_scale")
    return {name: torch.ones(1) for name in names}


class Layout(NamedTuple):
    said: dict[str, Any]  # quantization_config
    store: Callable[[str, torch.Tensor], tuple[torch.Tensor, Tensors]]
    understood: tuple[str, str, tuple[int, int]]  # scales, activations, block
    more: Callable[[str], Tensors] = lambda module: {}  # other tensors of a module


STATIC_TENSOR = ("tensor", "static", (0, 0))
LAYOUTS = {
    "channel, dynamic": Layout(compressed(), by_channel, ("channel", "dynamic", (0, 0))),
    "tensor, static": Layout(
        compressed("tensor", STATIC, format="naive-quantized"),
        by_tensor,
        STATIC_TENSOR,
        input_scales("input_scale"),
    ),
    "with a KV cache": Layout(
        compressed("tensor", STATIC, kv_cache_scheme=STATIC), by_tensor, STATIC_TENSOR, kv_scales
    ),
    "two groups of one kind": Layout(
        compressed(
            config_groups={
                name: compressed()["config_groups"]["group_0"] | {"targets": [f"re:.*{name}.*"]}
                for name in ("self_attn", "mlp")
            }
        ),
        by_channel,
        ("channel", "dynamic", (0, 0)),
    ),
    "AutoFP8": Layout(
        fp8(kv_cache_scheme="static"),
        by_tensor,
        STATIC_TENSOR,
        lambda module: kv_scales(module) | input_scales("input_scale")(module),
    ),
    "fp8 of transformers": Layout(
        fp8(weight_block_size=None),
        lambda name, weight: (
            by_tensor(name, weight)[0],
            {f"{name}_scale_inv": (weight.abs().max() / 448)},
        ),
        STATIC_TENSOR,
        input_scales("activation_scale"),
    ),
}
QWEN_BLOCKS = {
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 32],
    "modules_to_not_convert": ["lm_head"],
    "fmt": "e4m3",
}
DEQUANTIZED_LAYOUTS = {
    "blocks of Qwen": Layout(
        fp8(**QWEN_BLOCKS), by_block("_scale_inv"), ("block", "dynamic", (16, 32))
    ),
    "blocks of llm-compressor": Layout(
        compressed("block", {"dynamic": True, "strategy": "group", "group_size": 128}),
        by_block("_scale"),
        ("block", "dynamic", (16, 32)),
    ),
    "weights only": Layout(compressed(inputs=None), by_channel, ("channel", "none", (0, 0))),
}


def read(folder: Path) -> tuple[ModelConfig, Tensors]:
    config = read_model_config(str(folder))
    return config, dict(read_tensors(str(folder), config))


def understanding(config: ModelConfig) -> tuple[str, str, tuple[int, int]]:
    found = config.quantization
    assert found is not None
    return found.scales, found.activations, found.block


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_stay_fp8_with_a_scale_for_each_row(tmp_path: Path, layout: str) -> None:
    said, store, understood, more = LAYOUTS[layout]
    meant = make_fp8(tmp_path, said, store, more=more, intermediate_size=97)
    config, tensors = read(tmp_path)
    assert understanding(config) == understood
    assert config.dtype == "bfloat16"
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


@pytest.mark.parametrize("layout", DEQUANTIZED_LAYOUTS)
def test_other_fp8_weights_are_plain_ones_once_they_are_read(tmp_path: Path, layout: str) -> None:
    said, store, understood, more = DEQUANTIZED_LAYOUTS[layout]
    # 97 and 90 are no whole blocks.
    meant = make_fp8(
        tmp_path, said, store, more=more, intermediate_size=97, head_dim=18, rope_parameters=None
    )
    config, tensors = read(tmp_path)
    assert understanding(config) == understood
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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_without_fp8_gets_the_same_model_without_it(
    tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    said, store, _, more = LAYOUTS[layout]
    key = "compression_config" if layout == "channel, dynamic" else "quantization_config"
    meant = make_fp8(tmp_path, said, store, more=more, key=key)
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
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    values = {
        "architectures": ["Phi3ForCausalLM"],
        **sizes,
        **heads,
        "quantization_config": compressed(),
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_model_config(str(tmp_path), "dummy")
    fused = "model.layers.0.self_attn.qkv_proj.weight_scale"
    assert tensor_shapes(config)[fused] == (128,)
    ours = [f"model.layers.0.self_attn.{letter}_proj.weight_scale" for letter in "qkv"]
    assert stored_weights(config)[fused] == tuple(ours)
    assert [weight_shapes(config)[name] for name in ours] == [(64,), (32,), (32,)]


@pytest.mark.parametrize("layout", ["channel, dynamic", "blocks of llm-compressor"])
def test_an_output_layer_in_fp8_becomes_a_plain_one(tmp_path: Path, layout: str) -> None:
    said, store, _, _ = (LAYOUTS | DEQUANTIZED_LAYOUTS)[layout]
    meant = make_fp8(tmp_path, said | {"ignore": []}, store, plain=())
    config, tensors = read(tmp_path)
    assert "lm_head.weight" in quantized_weights(config)
    assert torch.equal(tensors["lm_head.weight"], meant["lm_head.weight"].float().bfloat16())
    assert "lm_head.weight_scale" not in tensors
    assert ("model.layers.0.mlp.up_proj.weight_scale" in tensors) == (layout in LAYOUTS)


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
    quantization = Quantization(
        "tensor", "dynamic", ("Linear",), ("mlp.gate", "model.layers.1", "re:.*o_proj")
    )
    covered = ["model.layers.10.mlp.up_proj", "model.layers.0.mlp.gate_proj", "lm_head"]
    ignored = [
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.up_proj",
        "model.layers.7.self_attn.o_proj",
    ]
    assert [quantization.covers(name) for name in covered + ignored] == [True] * 3 + [False] * 3
    named = replace(quantization, targets=(r"re:.*up_proj",), ignored=())
    assert [named.covers(name) for name in covered] == [True, False, False]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"quantization_config \(gptq\) is not supported; compressed-tensors",
        ),
        ({"bits": 4}, r"quantization_config \(unknown\) is not supported"),
        ("fp8", "quantization_config must be an object"),
        (compressed(format="pack-quantized"), "pack-quantized float8 weights are not supported"),
        (compressed(weights={"type": "int"}), "float-quantized int8 weights"),
        (compressed(weights={"num_bits": 4}), "float-quantized float4 weights"),
        (compressed("group"), "strategy 'group' is not supported; tensor, channel and block are"),
        (compressed(weights={"symmetric": False}), "only symmetric, static"),
        (
            compressed("block", weights={"block_structure": [128]}),
            r"block_structure must be two sizes, got \[128\]",
        ),
        (compressed(config_groups={}), "has no config_groups"),
        (
            compressed(
                config_groups={
                    "a": compressed()["config_groups"]["group_0"],
                    "b": compressed("tensor")["config_groups"]["group_0"],
                }
            ),
            "config_groups that differ",
        ),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config and transform_config",
        ),
        (
            compressed(transform_config={"config_groups": {}}),
            "sparsity_config and transform_config",
        ),
        (compressed(ignore="lm_head"), "ignore must be a list of strings"),
        (fp8(activation_scheme="odd"), "activation_scheme 'odd'"),
        (fp8(weight_block_size=[128]), r"weight_block_size must be two sizes, got \[128\]"),
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
        rf"{name}_scale is \(3,\), which is no scale per channel",
    )
    refused(
        stored | {"model.norm.weight": stored["model.norm.weight"].to(FP8)},
        "norm.weight is float8_e4m3fn; float32",
    )
    refused(
        stored | {name: stored[name][:5].contiguous()},
        rf"{name} is \(5, 64\), the config says \(96, 64\)",
    )


@pytest.mark.parametrize("layout", [*LAYOUTS, *DEQUANTIZED_LAYOUTS])
def test_dummy_weights_of_an_fp8_model_look_like_a_checkpoints(tmp_path: Path, layout: str) -> None:
    said = (LAYOUTS | DEQUANTIZED_LAYOUTS)[layout][0]
    make_tiny("Qwen3ForCausalLM", tmp_path)
    say(tmp_path, {"quantization_config": said, "dtype": "bfloat16"})
    config = read_model_config(str(tmp_path), "dummy")
    tensors = dict(read_tensors(str(tmp_path), config, "dummy"))
    assert tensors.keys() == tensor_shapes(config).keys()
    plain = replace(config, quantization=None)
    expected = dict(read_tensors(str(tmp_path), plain, "dummy"))
    found, _ = dequantized(tensors.items(), config, torch.float32)
    for name, tensor in found:
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=0.07, atol=1e-4)
