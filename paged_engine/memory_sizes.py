"""How many bytes a rank's weights and KV take, from the model's sizes. Takes dtypes by name and
never imports torch.
"""

from __future__ import annotations

import math

from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import weight_shapes
from kvrelay.wire.errors import ConfigError

__all__ = [
    "CPU_POOL_BYTES",
    "FP8",
    "RESERVE_BYTES",
    "block_bytes",
    "blocks_in",
    "bytes_per_head",
    "default_block_tokens",
    "least_weight_bytes",
    "longest_context",
]

FP8 = "float8_e4m3fn"
CPU_POOL_BYTES = 1 << 30  # unless another size is asked for
# On a GPU: CUDA graphs, their memory pool, allocator rounding and what libraries allocate late.
RESERVE_BYTES = 1 << 30
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
_SCALE_BYTES = 4


def default_block_tokens(device: str) -> int:
    """Tokens in a block on `cpu` or `cuda` unless another size is asked for (the reasons are in
    ARCHITECTURE.md).
    """
    return 16 if device == "cpu" else 64


def bytes_per_head(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one KV head in a block, over all layers."""
    vector = config.head_dim * _ITEM_BYTES[dtype] + (_SCALE_BYTES if dtype == FP8 else 0)
    return config.num_layers * 2 * block_size * vector


def block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block, over all layers."""
    return config.num_kv_heads * bytes_per_head(config, block_size, dtype)


def blocks_in(config: ModelConfig, *, pool_bytes: int, block_size: int, dtype: str) -> int:
    """Count the blocks that fit. Raises ConfigError if that is not enough for one block beside the
    null block.
    """
    block = block_bytes(config, block_size, dtype)
    blocks = pool_bytes // block
    if blocks < 2:
        raise ConfigError(
            f"a KV pool of {pool_bytes} bytes holds {blocks} blocks of {block} bytes; it needs at "
            f"least {2 * block}: "
            "raise kv_cache_memory_bytes, or gpu_memory_utilization on a GPU"
        )
    return blocks


def longest_context(
    wanted: int, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: str
) -> int:
    """Find the longest prompt plus answer that the model and a pool allow, or check the one
    `wanted` (0: none).

    Raises ConfigError naming the largest context that would fit if `wanted` does not.
    """
    room = (num_blocks - 1) * block_size
    if wanted > room:
        needed = (-(-wanted // block_size) + 1) * block_bytes(config, block_size, dtype)
        have = num_blocks * block_bytes(config, block_size, dtype)
        raise ConfigError(
            f"max_model_len {wanted} does not fit: the KV pool of {have} bytes holds {room} "
            f"tokens. Lower "
            f"max_model_len to at most {room}, or make room for {needed} bytes: with "
            f"kv_cache_memory_bytes, or on a "
            "GPU with a higher gpu_memory_utilization or kv_cache_dtype fp8"
        )
    return wanted or min(config.max_position, room)


def least_weight_bytes(config: ModelConfig, ranks: int, *, dtype: str, quantize: bool) -> int:
    """Count the bytes that the weights of one of `ranks` ranks take at least; `config` has the
    sizes of that rank.

    `quantize`: linear layers become fp8 while loading; the small ones and experts do not, but all
    are counted so.
    """
    total, shapes = 0, weight_shapes(config)
    for name, shape in shapes.items():
        in_fp8 = f"{name}_scale" in shapes or (
            quantize and len(shape) == 2 and name.startswith("model.layers.")
        )
        share = ranks if name == "lm_head.weight" else 1  # cut by rows
        total += math.prod(shape) * (1 if in_fp8 else _ITEM_BYTES[dtype]) // share
    return total
