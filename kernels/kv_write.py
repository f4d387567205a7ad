"""Write the keys and values of new tokens into their blocks. Torch reference and CPU path."""

from __future__ import annotations

import torch

__all__ = ["write_kv"]


def write_kv(
    pool: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """pool [num_blocks, kv_heads, layers, 2, block_tokens, head_dim]; key, value [tokens, kv_heads, head_dim].

    Token t goes to offset `offsets[t]` of block `blocks[t]` (int64 [tokens]). Padding rows name the null block 0.
    """
    of_layer = pool[:, :, layer]  # [num_blocks, kv_heads, 2, block_tokens, head_dim]
    of_layer[:, :, 0][blocks, :, offsets] = key
    of_layer[:, :, 1][blocks, :, offsets] = value
