"""Write the keys and values of new tokens into their blocks. Torch reference and CPU path."""

from __future__ import annotations

import torch

__all__ = ["write_kv"]


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Caches [num_blocks, kv_heads, block_tokens, head_dim], one layer's views of the pool.

    key, value [tokens, kv_heads, head_dim].

    Token t goes to offset `offsets[t]` of block `blocks[t]` (int64 [tokens]). Padding rows name the null block 0.
    """
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value
