"""q/k norm, rotary embedding, and K and V into the paged cache in one launch after QKV. Triton.

Grid: one program per TOKENS tokens and HEADS heads, which are all of Q, all of K or all of V. A
head is held as D / 2 pairs: the first R / 2 are the rotary ones, elements i and i + R / 2, the
others halves of the rest. A thread holds 8 elements of `first` for any number of tokens, so norms
add in one order. Source: Su et al., "RoFormer", 2021, half-split.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvrelay.kernels.fused_elementwise import e4m3_scale
from kvrelay.kernels.launch import cdiv, dependent, power_of_2

__all__ = ["rope_and_write"]


def rope_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
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
    """Rotate Q in place, write rotated K and V, return Q as a view [T, num_heads, head_dim].

    qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: rows may be strided; its K and V stay.
    positions int32 | int64 [T]. cos_sin fp32 [max_positions, R], cosines first; rounded
    once, where our CPU path rounds cosines and products too. q_norm, k_norm
    [head_dim]: RMS norm before it. Token t goes to offsets[t] of blocks[t] (int32 | int64 [T];
    padding: block 0). Caches [num_blocks, num_kv_heads, block_size, head_dim], the last two
    dimensions contiguous; with scales fp32 [num_blocks, num_kv_heads, block_size] they are
    float8_e4m3fn. The preceding kernel must not write positions, blocks or offsets.
    """
    tokens, q_heads, kv_heads = qkv.shape[0], num_heads, num_kv_heads
    rotary_dims = cos_sin.shape[1]
    assert qkv.shape[1] == (q_heads + 2 * kv_heads) * head_dim
    assert key_cache.stride()[2:] == (head_dim, 1)
    assert key_cache.dtype == (qkv.dtype if key_scales is None else torch.float8_e4m3fn)
    scale_strides = (0, 0, 1) if key_scales is None else key_scales.stride()

    query = qkv[:, : q_heads * head_dim].view(tokens, q_heads, head_dim)
    if not tokens:
        return query
    pairs = power_of_2(head_dim // 2)
    heads, warps = 1, 1  # few tokens: one head per warp
    if tokens > 512:  # heads in turn share cosines and sines
        heads = max(n for n in range(1, 5) if math.gcd(q_heads, kv_heads) % n == 0)
        warps = 4
    tile_tokens = max(1, 256 * warps // pairs)
    groups = (q_heads + 2 * kv_heads) // heads
    _rope_and_write[(cdiv(tokens, tile_tokens) * groups,)](
        qkv,
        positions,
        cos_sin,
        blocks,
        offsets,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        q_norm,
        k_norm,
        eps,
        tokens,
        qkv.stride(0),
        cos_sin.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        scale_strides[0],
        scale_strides[1],
        HQ=q_heads,
        HKV=kv_heads,
        D=head_dim,
        R=rotary_dims,
        PAIRS=pairs,
        TOKENS=tile_tokens,
        HEADS=heads,
        PLUS_ONE=plus_one,
        num_warps=warps,
        **dependent(qkv.device),
    )
    return query


@triton.jit
def _normed(
    first,
    second,
    first_gain,
    second_gain,
    eps,
    dtype: tl.constexpr,
    D: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
    if PLUS_ONE:
        first, second = first * scale * (1.0 + first_gain), second * scale * (1.0 + second_gain)
    else:
        first = (first * scale).to(dtype).to(tl.float32) * first_gain
        second = (second * scale).to(dtype).to(tl.float32) * second_gain
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


# Views of packed index arrays begin anywhere.
@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "blocks", "offsets"]
)
def _rope_and_write(
    qkv,
    positions,
    cos_sin,
    blocks,
    offsets,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    q_norm,
    k_norm,
    eps,
    tokens,
    qkv_stride,
    cos_sin_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = qkv.dtype.element_ty
    groups: tl.constexpr = (HQ + 2 * HKV) // HEADS
    head = tl.program_id(0) % groups * HEADS
    is_query = head < HQ
    is_value = head >= HQ + HKV
    token = tl.program_id(0) // groups * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens

    pair = tl.arange(0, PAIRS)[None, :]
    first = pair
    second = pair + R // 2
    if R < D:
        first = tl.where(pair < R // 2, pair, pair + R // 2)
        second = tl.where(pair < R // 2, pair + R // 2, pair + D // 2)
    inside = live[:, None] & (pair < D // 2)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if q_norm is not None:
        gain = k_norm
        if is_query:
            gain = q_norm
        # As a rectangle, which L1 serves, in the layout of the heads.
        first_gain = tl.load(gain + first + 0 * token[:, None], mask=inside, other=0.0).to(
            tl.float32
        )
        second_gain = tl.load(gain + second + 0 * token[:, None], mask=inside, other=0.0).to(
            tl.float32
        )
    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    angle = cos_sin + position[:, None] * cos_sin_stride + pair
    turning = live[:, None] & (pair < R // 2)
    cos = tl.load(angle, mask=turning, other=1.0)
    sin = tl.load(angle + R // 2, mask=turning, other=0.0)

    block = tl.load(blocks + token, mask=live, other=0).to(tl.int64)
    offset = tl.load(offsets + token, mask=live, other=0).to(tl.int64)
    cache = key_cache
    kv_head = (head - HQ).to(tl.int64)
    if is_value:
        cache = value_cache
        kv_head = (head - HQ - HKV).to(tl.int64)
    slot = cache + (block * block_stride + offset * D)[:, None]
    if key_scales is not None:
        scales = key_scales
        if is_value:
            scales = value_scales
        scale_slot = scales + (block * scale_block_stride + offset)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()

    source = qkv + token.to(tl.int64)[:, None] * qkv_stride + head * D
    for i in tl.static_range(HEADS):
        a = tl.load(source + i * D + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + i * D + second, mask=inside, other=0.0).to(tl.float32)
        if not is_value:
            if q_norm is not None:
                a, b = _normed(a, b, first_gain, second_gain, eps, dtype, D, PLUS_ONE)
            a, b = a * cos - b * sin, b * cos + a * sin
        a, b = a.to(dtype), b.to(dtype)
        if is_query:
            tl.store(source + i * D + first, a, mask=inside)
            tl.store(source + i * D + second, b, mask=inside)
        else:
            place = slot + (kv_head + i) * head_stride
            if key_scales is None:
                tl.store(place + first, a, mask=inside)
                tl.store(place + second, b, mask=inside)
            else:
                wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
                amax = tl.maximum(
                    tl.max(tl.abs(wide_a), 1, keep_dims=True),
                    tl.max(tl.abs(wide_b), 1, keep_dims=True),
                )
                scale, inverse = e4m3_scale(amax)
                tl.store(scale_slot + (kv_head + i) * scale_head_stride, scale, mask=live[:, None])
                tl.store(place + first, (wide_a * inverse).to(tl.float8e4nv), mask=inside)
                tl.store(place + second, (wide_b * inverse).to(tl.float8e4nv), mask=inside)
