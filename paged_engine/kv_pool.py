"""The KV pool of one rank: bytes in blocks, with a typed view for the kernels and an address for the connectors.

Layout (design §2): [num_blocks, kv_heads, layers, 2, block_tokens, head_dim]. All that a block of tokens holds, for all
layers, is one contiguous piece, and so is any slice of its heads. Block 0 is the null block: padding is written there
and nobody reads it. In fp8 each head's slice ends with its scales, fp32 [layers, 2, block_tokens]: the values of a
token and head are fp8 times its scale.
"""

from __future__ import annotations

import torch

from kernels.pool_memory import zeros
from paged_engine.model_config import ModelConfig
from wire.errors import ConfigError

__all__ = [
    "CPU_POOL_BYTES",
    "FP8",
    "KVPool",
    "block_bytes",
    "blocks_in",
    "default_block_tokens",
    "longest_context",
    "zeros",
]

FP8 = torch.float8_e4m3fn
CPU_POOL_BYTES = 1 << 30  # unless another size is asked for
_SCALE_BYTES = 4


def _bytes_per_head(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
    vector = config.head_dim * dtype.itemsize + (_SCALE_BYTES if dtype == FP8 else 0)
    return config.num_layers * 2 * block_tokens * vector


def default_block_tokens(device: torch.device) -> int:
    """Tokens in a block unless another size is asked for (the reasons are in ARCHITECTURE.md)."""
    return 16 if device.type == "cpu" else 64


def block_bytes(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one block, over all layers."""
    return config.num_kv_heads * _bytes_per_head(config, block_tokens, dtype)


class KVPool:
    """Allocated once; `layers` is what kernels take, `address` and `block_bytes` what transfers take."""

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_tokens, self.dtype = num_blocks, block_tokens, dtype
        heads, layers, dim = config.num_kv_heads, config.num_layers, config.head_dim
        self.bytes_per_head = _bytes_per_head(config, block_tokens, dtype)
        self.block_bytes = heads * self.bytes_per_head
        # Zeros, not empty: masked positions are multiplied by an exact zero, and zero times a stray NaN is NaN.
        # And memory that peers on this host can map.
        self.bytes = zeros(num_blocks * self.block_bytes, device).view(num_blocks, heads, self.bytes_per_head)
        vectors = layers * 2 * block_tokens * dim * dtype.itemsize
        shape = (num_blocks, heads, layers, 2, block_tokens, dim)
        self.view = self.bytes[:, :, :vectors].view(dtype).view(shape)

        # Each layer's keys and values, [num_blocks, kv_heads, block_tokens, head_dim], and in fp8 their scales,
        # [num_blocks, kv_heads, block_tokens].
        self.layers: list[tuple[torch.Tensor, ...]] = [
            (self.view[:, :, layer, 0], self.view[:, :, layer, 1]) for layer in range(layers)
        ]
        if dtype == FP8:
            scales = self.bytes[:, :, vectors:].view(torch.float32).view(shape[:-1])
            self.layers = [
                (*pair, scales[:, :, layer, 0], scales[:, :, layer, 1]) for layer, pair in enumerate(self.layers)
            ]

    @property
    def address(self) -> int:
        """Address of block 0; block i lies `i * block_bytes` behind it."""
        return self.bytes.data_ptr()


def blocks_in(config: ModelConfig, *, pool_bytes: int, block_tokens: int, dtype: torch.dtype) -> int:
    """How many blocks fit. Raises ConfigError if that is not enough for one block beside the null block."""
    block = block_bytes(config, block_tokens, dtype)
    blocks = pool_bytes // block
    if blocks < 2:
        raise ConfigError(
            f"a KV pool of {pool_bytes} bytes holds {blocks} blocks of {block} bytes; it needs at least {2 * block}: "
            "raise kv_cache_memory, or gpu_memory_utilization on a GPU"
        )
    return blocks


def longest_context(wanted: int, config: ModelConfig, *, num_blocks: int, block_tokens: int, dtype: torch.dtype) -> int:
    """The longest prompt plus answer that the model and a pool of `num_blocks` allow; all of it if `wanted` is 0.

    Raises ConfigError naming the largest context that would fit if `wanted` does not.
    """
    room = (num_blocks - 1) * block_tokens
    if wanted > room:
        needed = (-(-wanted // block_tokens) + 1) * block_bytes(config, block_tokens, dtype)
        have = num_blocks * block_bytes(config, block_tokens, dtype)
        raise ConfigError(
            f"max_model_len {wanted} does not fit: the KV pool of {have} bytes holds {room} tokens. Lower "
            f"max_model_len to at most {room}, or make room for {needed} bytes: with kv_cache_memory, or on a GPU with "
            "a higher gpu_memory_utilization or kv_cache_dtype fp8"
        )
    return wanted or min(config.max_position, room)
