"""What is known before a weight is downloaded or read: whether a device can serve a model as
configured, and how much memory that takes at least.

Refuses early what would be refused late: needs the settings and config.json alone (of a GGUF model
its header). Never imports torch, so that any process may ask; which devices there are is the
caller's to say.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.paged_engine.memory_sizes import (
    CPU_POOL_BYTES,
    FP8,
    block_bytes,
    blocks_in,
    default_block_tokens,
    least_weight_bytes,
    longest_context,
)
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.paged_engine.sharding import shard_config
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

__all__ = ["checked_model", "dtype_of", "kv_dtype_of", "least_memory"]


def checked_model(config: EngineConfig, device: str) -> ModelConfig:
    """Read the model's config, whole. Raises ConfigError if `cpu` or `cuda` cannot serve it as
    configured.
    """
    model = read_model_config(config.model, config.load_format)
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's own limit of "
            f"{model.max_position}; lower it"
        )
    shard = shard_config(model, config.tensor_parallel_size)
    dtype_of(config, model, device)
    if device == "cpu" and (config.kv_cache_dtype != "auto" or config.quantization):
        raise ConfigError(
            "kv_cache_dtype fp8 and quantization fp8 need a GPU; leave them out on a CPU"
        )
    pool_bytes = config.kv_cache_memory_bytes or (CPU_POOL_BYTES if device == "cpu" else 0)
    if pool_bytes:  # on a GPU the rest is measured
        block_size = config.block_size or default_block_tokens(device)
        dtype = kv_dtype_of(config, model, device)
        num_blocks = blocks_in(shard, pool_bytes=pool_bytes, block_size=block_size, dtype=dtype)
        longest_context(
            config.max_model_len, shard, num_blocks=num_blocks, block_size=block_size, dtype=dtype
        )
    return model


def dtype_of(config: EngineConfig, model: ModelConfig, device: str) -> str:
    """Name what the model is computed in. Raises ConfigError if the device does not serve the dtype
    asked for.
    """
    wanted = config.dtype
    if device == "cpu":
        # fp32 unless asked otherwise: bf16 products are ten times slower on CPUs without bf16
        # units.
        return "float32" if wanted == "auto" else wanted
    if wanted == "float32":
        raise ConfigError(
            "dtype float32 is not served on a GPU; use bfloat16, float16 or auto, or device cpu"
        )
    if wanted == "auto":
        return "bfloat16" if model.dtype == "float32" else model.dtype
    return wanted


def kv_dtype_of(config: EngineConfig, model: ModelConfig, device: str) -> str:
    """Name what KV is kept in. Raises ConfigError as `dtype_of` does."""
    return FP8 if config.kv_cache_dtype == "fp8" else dtype_of(config, model, device)


def least_memory(config: EngineConfig, model: ModelConfig, device: str) -> tuple[int, int]:
    """Count the bytes of weights and of KV pool that each rank takes at least, of the whole
    `model`.

    On a GPU the pool is what was asked for, or one context of `max_model_len` (two blocks if none
    was named).
    """
    shard = shard_config(model, config.tensor_parallel_size)
    if device == "cpu":  # computes in no fp8
        shard = replace(shard, quantization=None)
    dtype, quantize = dtype_of(config, model, device), config.quantization == "fp8"
    weights = least_weight_bytes(shard, config.tensor_parallel_size, dtype=dtype, quantize=quantize)
    tokens = config.block_size or default_block_tokens(device)
    blocks = 1 + max(1, -(-config.max_model_len // tokens))
    needed = blocks * block_bytes(shard, tokens, kv_dtype_of(config, model, device))
    return weights, config.kv_cache_memory_bytes or (CPU_POOL_BYTES if device == "cpu" else needed)
