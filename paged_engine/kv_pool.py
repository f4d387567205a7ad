"""The KV pool of one rank: bytes in blocks, with a typed view for the kernels and an address for the connectors.

Layout (design §2): [num_blocks, kv_heads, layers, 2, block_tokens, head_dim]. All that a block of tokens holds, for all
layers, is one contiguous piece, and so is any slice of its heads. Block 0 is the null block: padding is written there
and nobody reads it.
"""

from __future__ import annotations

import torch

from paged_engine.model_config import ModelConfig
from wire.errors import ConfigError

__all__ = ["KVPool"]


class KVPool:
    """Allocated once; `layers` is what kernels take, `address` and `block_bytes` what transfers take."""

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.bytes_per_head = config.num_layers * 2 * block_tokens * config.head_dim * dtype.itemsize
        self.block_bytes = config.num_kv_heads * self.bytes_per_head
        # Zeros, not empty: masked positions are multiplied by an exact zero, and zero times a stray NaN is NaN.
        self.bytes = torch.zeros(num_blocks, config.num_kv_heads, self.bytes_per_head, dtype=torch.uint8, device=device)
        self.view = self.bytes.view(dtype).view(
            num_blocks, config.num_kv_heads, config.num_layers, 2, block_tokens, config.head_dim
        )

        # Each layer's keys and values, [num_blocks, kv_heads, block_tokens, head_dim].
        self.layers = [(self.view[:, :, layer, 0], self.view[:, :, layer, 1]) for layer in range(config.num_layers)]

    @property
    def address(self) -> int:
        """Address of block 0; block i lies `i * block_bytes` behind it."""
        return self.bytes.data_ptr()

    @staticmethod
    def blocks_in(config: ModelConfig, *, pool_bytes: int, block_tokens: int, dtype: torch.dtype) -> int:
        """How many blocks fit. Raises ConfigError if that is not enough for one block beside the null block."""
        block = config.num_kv_heads * config.num_layers * 2 * block_tokens * config.head_dim * dtype.itemsize
        blocks = pool_bytes // block
        if blocks < 2:
            raise ConfigError(
                f"kv_cache_bytes {pool_bytes} holds {blocks} blocks of {block} bytes; give at least {2 * block}"
            )
        return blocks
