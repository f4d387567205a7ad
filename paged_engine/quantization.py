"""fp8 checkpoints: how their scales are stored, and the way back to plain weights.

Two layouts are read: compressed-tensors with a scale per output row, and fp8 with a scale per block
(DeepSeek, Qwen). The real weight is fp8 * scale, also where that is called weight_scale_inv.
Activations are scaled per token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch

from kvrelay.kernels.decoder_layer import dequantize
from kvrelay.paged_engine.model_config import ModelConfig, Quantization
from kvrelay.paged_engine.model_tensors import quantized_weights, tensor_shapes
from kvrelay.wire.errors import ConfigError

__all__ = [
    "dequantized",
    "unpacked",
]

FP8 = torch.float8_e4m3fn


def unpacked(
    stored: Iterable[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors as tensor_shapes(config) has them.

    A kept weight_scale becomes fp32 [out]. Other fp8 weights get the config's dtype. Raises
    ConfigError if a weight is not fp8 or its scale has a wrong shape.
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
    block = quantization.block or (1, shape[1])
    wanted = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    if list(scale.shape) not in ([wanted] if quantization.block else [wanted, wanted[:1]]):
        raise ConfigError(
            f"tensor {name} is {tuple(scale.shape)}; for a weight {list(shape)} it must be {wanted}"
        )
    return scale.float().view(wanted if quantization.block else -1)


def dequantized(
    tensors: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, dtype: torch.dtype
) -> tuple[Iterator[tuple[str, torch.Tensor]], ModelConfig]:
    if config.quantization is None:
        return iter(tensors), config
    kept = {name for name in quantized_weights(config) if config.quantization.keeps(name)}
    return _joined(tensors, kept, dtype, None), replace(config, quantization=None)


def _joined(
    tensors: Iterable[tuple[str, torch.Tensor]],
    fp8: Collection[str],
    dtype: torch.dtype,
    block: tuple[int, int] | None,
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
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] | None
) -> torch.Tensor:
    if block is None:
        return dequantize(weight, scale, dtype)
    rows, columns = weight.shape
    scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * scale).to(dtype)
