"""The KV pool of one rank: a typed view for kernels and an address for connectors.

Layout: [num_blocks, kv_heads, layers, 2, block_size, head_dim]. A block and any slice of its heads
are contiguous. Block 0 is the null block: padding is written there and nobody reads it. In fp8 each
head's slice ends with its scales, fp32 [layers, 2, block_size].
"""

from __future__ import annotations

import torch

from kvrelay.kernels.pool_memory import zeros
from kvrelay.paged_engine.before_loading import bytes_per_head
from kvrelay.paged_engine.model_config import ModelConfig

__all__ = ["FP8", "KVPool"]

FP8 = torch.float8_e4m3fn


class KVPool:
    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        heads, layers, dim = config.num_kv_heads, config.num_layers, config.head_dim
        self.bytes_per_head = bytes_per_head(config, block_size, str(dtype).removeprefix("torch."))
        self.block_bytes = heads * self.bytes_per_head
        # Zeros: masked positions are multiplied by zero, and zero times NaN is NaN.
        self.bytes = zeros(num_blocks * self.block_bytes, device).view(
            num_blocks, heads, self.bytes_per_head
        )
        vectors = layers * 2 * block_size * dim * dtype.itemsize
        shape = (num_blocks, heads, layers, 2, block_size, dim)
        self.view = self.bytes[:, :, :vectors].view(dtype).view(shape)

        # [num_blocks, kv_heads, block_size, head_dim], and in fp8 their scales.
        self.layers: list[tuple[torch.Tensor, ...]] = [
            (self.view[:, :, layer, 0], self.view[:, :, layer, 1]) for layer in range(layers)
        ]
        if dtype == FP8:
            scales = self.bytes[:, :, vectors:].view(torch.float32).view(shape[:-1])
            self.layers = [
                (*pair, scales[:, :, layer, 0], scales[:, :, layer, 1])
                for layer, pair in enumerate(self.layers)
            ]

    @property
    def address(self) -> int:
        """Return the address of block 0; block i lies `i * block_bytes` behind."""
        return self.bytes.data_ptr()
