"""fp8 checkpoints: how their scales are stored, and the way back to plain weights.

Two layouts are read: compressed-tensors (llm-compressor) and fp8 (AutoFP8, vLLM, DeepSeek and Qwen
with blocks). The real weight is fp8 * scale, also where that is called weight_scale_inv. Scales of
activations and of the KV cache are passed over: both are scaled per token here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch

from kvrelay.kernels.elementwise import dequantize, quantize_e4m3
from kvrelay.paged_engine.model_config import ModelConfig, Quantization
from kvrelay.paged_engine.model_tensors import quantized_weights, tensor_shapes
from kvrelay.wire.errors import ConfigError

__all__ = [
    "canonical_name",
    "dequantized",
    "is_passed_over",
    "quantized",
    "unpacked",
]

FP8 = torch.float8_e4m3fn
_PASSED_OVER = re.compile(
    r"\.(input_scale|activation_scale)$"
    r"|\.self_attn\.([qkv]_proj\.)?(([qkv]|kv|prob_output|output)_scale)$"
)


def canonical_name(name: str) -> str:
    return name.removesuffix("_inv") if name.endswith(".weight_scale_inv") else name


def is_passed_over(name: str) -> bool:
    return _PASSED_OVER.search(name) is not None


def unpacked(
    stored: Iterable[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors as tensor_shapes(config) has them.

    A kept weight_scale becomes fp32 [out]; a single number is repeated. Other fp8 weights get the
    config's dtype. Raises ConfigError if a weight is not fp8 or its scale has a wrong shape.
    """
    quantization = config.quantization
    assert quantization is not None
    shapes = tensor_shapes(replace(config, quantization=None))
    fp8 = quantized_weights(config)

    def checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
        weight = name.removesuffix("_scale")
        if weight not in fp8:
            return tensor
        if name == weight:
            if tensor.dtype != FP8:
                raise ConfigError(
                    f"model {config.name}: tensor {name} is {tensor.dtype}, the config says {FP8}"
                )
            return tensor
        return _scale(name, tensor, shapes[weight], quantization)

    plain = {name for name in fp8 if not quantization.keeps(name)}
    tensors = ((name, checked(name, tensor)) for name, tensor in stored)
    return _joined(tensors, plain, getattr(torch, config.dtype), quantization.block)


def _scale(
    name: str, scale: torch.Tensor, shape: tuple[int, ...], quantization: Quantization
) -> torch.Tensor:
    rows, columns = shape
    scale = scale.float()
    if quantization.scales == "block":
        wanted = tuple(
            -(-size // step) for size, step in zip(shape, quantization.block, strict=True)
        )
        if tuple(scale.shape) == wanted:
            return scale
    elif scale.numel() == 1:
        return scale.reshape(1).repeat(rows)
    elif scale.numel() == rows:
        return scale.reshape(rows)
    raise ConfigError(
        f"tensor {name} is {tuple(scale.shape)}, which is no scale per {quantization.scales} of a "
        f"weight [{rows}, {columns}]"
    )


def dequantized(
    tensors: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, dtype: torch.dtype
) -> tuple[Iterator[tuple[str, torch.Tensor]], ModelConfig]:
    """Return the same model without fp8, one weight in memory at a time."""
    if config.quantization is None:
        return iter(tensors), config
    kept = {name for name in quantized_weights(config) if config.quantization.keeps(name)}
    return _joined(tensors, kept, dtype, (0, 0)), replace(config, quantization=None)


def _joined(
    tensors: Iterable[tuple[str, torch.Tensor]],
    fp8: Collection[str],
    dtype: torch.dtype,
    block: tuple[int, int],
) -> Iterator[tuple[str, torch.Tensor]]:
    waiting: dict[str, torch.Tensor] = {}  # by the weight's name
    for name, tensor in tensors:
        weight = name.removesuffix("_scale")
        if weight not in fp8:
            yield name, tensor
        elif weight not in waiting:
            waiting[weight] = tensor
        else:
            pair = (
                (waiting.pop(weight), tensor)
                if name.endswith("_scale")
                else (tensor, waiting.pop(weight))
            )
            yield weight, _plain(*pair, dtype, block)


def _plain(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]
) -> torch.Tensor:
    if not block[0]:
        return dequantize(weight, scale, dtype)
    rows, columns = weight.shape
    scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * scale).to(dtype)


def quantized(
    tensors: Iterable[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield plain tensors, in fp8 where the config keeps that."""
    fp8, quantization = quantized_weights(config), config.quantization
    for name, tensor in tensors:
        if name in fp8 and quantization is not None and quantization.keeps(name):
            weight, scale = quantize_e4m3(tensor)
            yield name, weight
            yield f"{name}_scale", scale.reshape(-1)
        else:
            yield name, tensor
