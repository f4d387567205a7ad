"""Check before weights are read or downloaded: can a device serve a model, in how much memory?

Needs only the settings and config.json (or a GGUF header). Imports torch only to look for a device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.paged_engine.model_tensors import weight_shapes
from kvrelay.paged_engine.sharding import shard_config
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CPU_POOL_BYTES",
    "FP8",
    "RESERVE_BYTES",
    "block_bytes",
    "bytes_per_head",
    "check_engine",
    "checked_model",
    "choose_device",
    "default_block_tokens",
    "fit_pool",
    "compute_dtype",
    "kv_dtype_name",
    "least_memory",
    "least_weight_bytes",
]

FP8 = "float8_e4m3fn"
CPU_POOL_BYTES = 1 << 30
# CUDA graphs, their memory pool, allocator rounding, and what libraries allocate late.
RESERVE_BYTES = 1 << 30
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
_SCALE_BYTES = 4


def default_block_tokens(device: str) -> int:
    return 16 if device == "cpu" else 64


def bytes_per_head(config: ModelConfig, block_size: int, dtype: str) -> int:
    vector = config.head_dim * _ITEM_BYTES[dtype] + (_SCALE_BYTES if dtype == FP8 else 0)
    return config.num_layers * 2 * block_size * vector


def block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    return config.num_kv_heads * bytes_per_head(config, block_size, dtype)


def least_weight_bytes(config: ModelConfig, ranks: int, *, dtype: str, quantize: bool) -> int:
    """Return the fewest bytes of one rank's weights; `config` has that rank's sizes.

    With `quantize` all linear layers count as fp8, also small ones and experts.
    """
    total, shapes = 0, weight_shapes(config)
    for name, shape in shapes.items():
        in_fp8 = f"{name}_scale" in shapes or (
            quantize and len(shape) == 2 and name.startswith("model.layers.")
        )
        share = ranks if name == "lm_head.weight" else 1  # cut by rows
        total += math.prod(shape) * (1 if in_fp8 else _ITEM_BYTES[dtype]) // share
    return total


def checked_model(config: EngineConfig, device: str) -> ModelConfig:
    model = read_model_config(config.model, config.load_format)
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's own limit of "
            f"{model.max_position}; lower it"
        )
    shard = shard_config(model, config.tensor_parallel_size)
    compute_dtype(config, model, device)
    if device == "cpu" and (config.kv_cache_dtype != "auto" or config.quantization):
        raise ConfigError(
            "kv_cache_dtype fp8 and quantization fp8 need a GPU; leave them out on a CPU"
        )
    pool_bytes = config.kv_cache_memory_bytes or (CPU_POOL_BYTES if device == "cpu" else 0)
    if pool_bytes:  # on a GPU the rest is measured
        fit_pool(config, shard, device, pool_bytes)
    return model


def fit_pool(
    config: EngineConfig,
    shard: ModelConfig,
    device: str,
    pool_bytes: int,
    minimum: Callable[[int], int] = lambda blocks: blocks,
) -> tuple[int, int]:
    """Return how many blocks fit, at `minimum` of all ranks, and the longest context.

    Raises ConfigError unless one block fits beside the null block, and for a context without room.
    """
    size = config.block_size or default_block_tokens(device)
    block = block_bytes(shard, size, kv_dtype_name(config, shard, device))
    if pool_bytes < 2 * block:
        raise ConfigError(
            f"a KV pool of {pool_bytes} bytes holds {pool_bytes // block} blocks of {block} bytes; "
            f"it needs at least {2 * block}: raise kv_cache_memory_bytes, or "
            "gpu_memory_utilization on a GPU"
        )
    blocks = minimum(pool_bytes // block)
    wanted, room = config.max_model_len, (blocks - 1) * size
    if wanted > room:
        raise ConfigError(
            f"max_model_len {wanted} does not fit: the KV pool of {blocks * block} bytes holds "
            f"{room} tokens. Lower max_model_len to at most {room}, or make room for "
            f"{(-(-wanted // size) + 1) * block} bytes: with kv_cache_memory_bytes, or on a GPU "
            "with a higher gpu_memory_utilization or kv_cache_dtype fp8"
        )
    return blocks, wanted or min(shard.max_position, room)


def compute_dtype(config: EngineConfig, model: ModelConfig, device: str) -> str:
    wanted = config.dtype
    if device == "cpu":
        # bf16 products are ten times slower on CPUs without bf16 units.
        return "float32" if wanted == "auto" else wanted
    if wanted == "float32":
        raise ConfigError(
            "dtype float32 is not served on a GPU; use bfloat16, float16 or auto, or device cpu"
        )
    if wanted == "auto":
        return "bfloat16" if model.dtype == "float32" else model.dtype
    return wanted


def kv_dtype_name(config: EngineConfig, model: ModelConfig, device: str) -> str:
    return FP8 if config.kv_cache_dtype == "fp8" else compute_dtype(config, model, device)


def least_memory(config: EngineConfig, model: ModelConfig, device: str) -> tuple[int, int]:
    """Return the fewest bytes of weights and of KV pool that each rank takes.

    On a GPU: the pool that was asked for, or one context of `max_model_len`.
    """
    shard = shard_config(model, config.tensor_parallel_size)
    if device == "cpu":
        shard = replace(shard, quantization=None)
    dtype, quantize = compute_dtype(config, model, device), config.quantization == "fp8"
    weights = least_weight_bytes(shard, config.tensor_parallel_size, dtype=dtype, quantize=quantize)
    tokens = config.block_size or default_block_tokens(device)
    blocks = 1 + max(1, -(-config.max_model_len // tokens))
    needed = blocks * block_bytes(shard, tokens, kv_dtype_name(config, model, device))
    return weights, config.kv_cache_memory_bytes or (CPU_POOL_BYTES if device == "cpu" else needed)


def check_engine(config: EngineConfig) -> None:
    ranks = config.tensor_parallel_size_local or config.tensor_parallel_size
    checked_model(config, choose_device(config.device, ranks - 1).type)


def choose_device(wanted: str, index: int | None = None) -> torch.device:
    """Return the device; `index` is a GPU's. Raises ConfigError."""
    import torch

    # With 8 shared work queues a stream that waits for a peer holds up the steps.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda was asked for, but torch sees no GPU; use --device cpu or install a CUDA "
            "build of torch"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"{index + 1} ranks here need {index + 1} GPUs, and this host shows "
            f"{torch.cuda.device_count()}; lower tensor_parallel_size, or "
            "tensor_parallel_size_local and start other ranks elsewhere with `kvrelay rank`"
        )
    return torch.device("cuda", index)
