"""Write the keys and values of new tokens into their blocks. Torch reference and CPU path."""

from __future__ import annotations

import torch

from kvrelay.kernels.norm_rope_act import apply_rope, quantize_e4m3, rms_norm

__all__ = ["rope_and_write", "write_kv"]


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Caches [num_blocks, kv_heads, block_size, head_dim], one layer's views of the pool.

    key, value [tokens, kv_heads, head_dim].

    Token t goes to offset `offsets[t]` of block `blocks[t]` (int64 [tokens]). Padding rows name the
    null block 0.
    """
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def rope_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `fused_rope_write.rope_and_write`, which states shapes and rounding."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    value = heads[:, num_heads + num_kv_heads :]
    if q_norm is not None:
        query_normed = rms_norm(query, q_norm, eps, plus_one=plus_one)
        key = rms_norm(key, k_norm, eps, plus_one=plus_one)
    else:
        query_normed = query
    if cos_sin is None:
        query.copy_(query_normed)
    else:
        cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
        query.copy_(apply_rope(query_normed.float(), cos, sin))
        key = apply_rope(key.float(), cos, sin).to(qkv.dtype)
    blocks, offsets = blocks.long(), offsets.long()
    if key_scales is None or value_scales is None:
        write_kv(key_cache, value_cache, key, value, blocks, offsets)
        return query
    for cache, scales, vectors in (
        (key_cache, key_scales, key),
        (value_cache, value_scales, value),
    ):
        stored, scale = quantize_e4m3(vectors)
        # As bytes: torch has no indexed copy of fp8 on all devices.
        cache.view(torch.uint8)[blocks, :, offsets] = stored.view(torch.uint8)
        scales[blocks, :, offsets] = scale.squeeze(-1)
    return query
