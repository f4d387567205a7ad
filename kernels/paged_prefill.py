"""Attention of prefill chunks over paged KV: variable length, prefixes, windows, grouped heads.

The kernel for every device; Hopper's for 16-bit KV is `kernels/paged_prefill_hopper.py`. Both
compute a tile of queries at a time and walk its keys in *strips*. T rows of queries, Hq query
heads, Hkv KV heads, D head dim, S sequences. Grid: (tiles * Hq / heads of a tile), tiles with many
keys first.

Batch-invariant: strips lie on a fixed grid from position 0, every product has one shape, and a
strip of which a row sees no key adds zero: a decode row has the bits that it would have within a
prefill.

fp8 (e4m3) is widened by bit operations: in the places of fp16 the bits are the number / 256,
exactly. Algorithm: Dao, "FlashAttention-2", 2023. Twin: `kernels/paged_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.kernels.launch import capability, power_of_2

__all__ = [
    "TILE_ROWS",
    "hopper_serves",
    "paged_prefill",
    "prefill_tiles",
    "tile_heads",
    "tile_tokens",
]

TILE_ROWS = 128
LOG2_E = 1 / math.log(2)
# Finite: a row that has seen no key gets no NaN.
LOWEST = tl.constexpr(-1e30)


def tile_heads(group: int) -> int:
    """Return the query heads in one tile: the largest power of two that divides `group`."""
    return min(group & -group, TILE_ROWS // 2)


def tile_tokens(group: int) -> int:
    return TILE_ROWS // tile_heads(group)


def prefill_tiles(
    query_lens: Sequence[int], context_lens: Sequence[int], *, group: int
) -> np.ndarray:
    """Cut each sequence's query tokens into tiles, int32 [tiles, 2]: (sequence, first token).

    A tile has TILE_ROWS rows, token-major: heads that share a KV head, times consecutive tokens.
    query_lens: this step's tokens; context_lens: all tokens. Tiles with many
    keys come first: small ones fill the last round.
    """
    tokens = tile_tokens(group)
    queries, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    per_sequence = -(-queries // tokens)
    sequence = np.repeat(np.arange(len(queries)), per_sequence)
    before = np.cumsum(per_sequence) - per_sequence
    first = (np.arange(len(sequence)) - before[sequence]) * tokens
    newest = np.minimum((contexts - queries)[sequence] + first + tokens, contexts[sequence])
    order = np.argsort(-newest, kind="stable")
    return np.stack([sequence, first], axis=1)[order].astype(np.int32)


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q k^T) v of each query over its sequence's keys up to its own.

    query, out [T, Hq, D], last dim contiguous. Caches [num_blocks, Hkv, block_size, D]: one layer's
    views of the pool, with this step's keys; fp8 ones with scales [num_blocks, Hkv, block_size]
    fp32. All int32: block_tables [S, max_blocks], query_starts [S + 1] (rows of `query`),
    context_lens [S], tiles of `prefill_tiles`. Rows from query_starts[S] on are padding: `out`
    stays. `window` keys are seen (0: all); `softcap` c makes a score c * tanh(score / c) (0: none).
    """
    heads, head_dim = query.shape[1:]
    kv_heads, block_size = key_cache.shape[1:3]
    assert block_size in (16, 32, 64)
    assert key_cache.stride()[2:] == (head_dim, 1)
    assert (key_scales is None) == (key_cache.dtype == query.dtype)
    if len(tiles) == 0:
        return out
    if hopper_serves(query, key_cache, out):
        from kvrelay.kernels.paged_prefill_hopper import hopper_prefill

        return hopper_prefill(
            query,
            key_cache,
            value_cache,
            block_tables,
            query_starts,
            context_lens,
            tiles,
            out=out,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    group = heads // kv_heads
    strip, stages = _launch_shape(query, key_cache)
    if key_scales is not None and value_scales is not None:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scale_strides = key_scales.stride()[:2]
    else:
        scale_strides = (0, 0)
    _prefill_kernel[(len(tiles) * (heads // tile_heads(group)),)](
        query,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        block_tables,
        query_starts,
        context_lens,
        tiles,
        out,
        *query.stride()[:2],
        *key_cache.stride()[:2],
        *scale_strides,
        block_tables.stride(0),
        *out.stride()[:2],
        2 * LOG2_E * scale / softcap if softcap else LOG2_E * scale,
        LOG2_E * softcap,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEADS=tile_heads(group),
        TOKENS=tile_tokens(group),
        HEAD_DIM=head_dim,
        DIM=power_of_2(head_dim),
        STRIP=strip,
        BLOCK_TOKENS=block_size,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        FP8=key_scales is not None,
        num_warps=8,
        num_stages=stages,
    )
    return out


def _launch_shape(query: torch.Tensor, key_cache: torch.Tensor) -> tuple[int, int]:
    # Keys per strip, which decide a row's bits, and strips in flight plus one.
    hopper = capability(query.device) >= (9, 0)
    # Else registers spill.
    if query.shape[2] > 128 or (not hopper and key_cache.dtype != query.dtype):
        return 32, 2
    return 64, 3 if hopper else 2


def hopper_serves(query: torch.Tensor, key_cache: torch.Tensor, out: torch.Tensor) -> bool:
    head_dim = query.shape[2]
    return (
        capability(query.device) == (9, 0)
        and key_cache.dtype == query.dtype
        # TMA sees the pool as rows of one size, with strides of whole 16 bytes.
        and all(stride % head_dim == 0 for stride in key_cache.stride()[:2])
        and all(stride % 8 == 0 for stride in (head_dim, *query.stride()[:2], *out.stride()[:2]))
        and all(tensor.data_ptr() % 16 == 0 for tensor in (query, key_cache, out))
    )


@triton.jit
def _prefill_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    query_starts,
    context_lens,
    tiles,
    out,
    query_token_stride,
    query_head_stride,
    block_stride,
    kv_head_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    out_token_stride,
    out_head_stride,
    to_exponent,  # of two, or of the soft cap's tanh
    cap,  # the soft cap as an exponent of two
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
):
    head_tiles: tl.constexpr = KV_HEADS * GROUP // HEADS
    tile = tl.program_id(0) // head_tiles
    first_head = tl.program_id(0) % head_tiles * HEADS
    kv_head = (first_head // GROUP).to(tl.int64)
    sequence = tl.load(tiles + 2 * tile).to(tl.int64)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(query_starts + sequence)
    tokens = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    oldest = context - tokens + first  # of the tile's first token

    rows = tl.arange(0, TOKENS * HEADS)
    dims = tl.arange(0, DIM)
    token = first + rows // HEADS
    token_row = (start + token).to(tl.int64)
    head = first_head + rows % HEADS
    position = oldest + rows // HEADS
    valid = (token < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    at_query = (
        query + (token_row * query_token_stride + head * query_head_stride)[:, None] + dims[None, :]
    )
    q = tl.load(at_query, mask=valid, other=0.0)

    # Rows see keys in strips [begin, end); every row sees all of [whole, ragged).
    end = tl.cdiv(tl.minimum(oldest + TOKENS, context), STRIP)
    begin, whole = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(oldest - WINDOW + 1, 0) // STRIP
        whole = tl.minimum(tl.cdiv(tl.maximum(oldest + TOKENS - WINDOW, 0), STRIP), end)
    ragged = tl.maximum((oldest + 1) // STRIP, whole)

    table = block_tables + sequence * table_stride
    keys += kv_head * kv_head_stride
    values += kv_head * kv_head_stride
    if FP8:
        key_scales += kv_head * scale_head_stride
        value_scales += kv_head * scale_head_stride
    mixed = tl.zeros([TOKENS * HEADS, DIM], tl.float32)
    top = tl.full([TOKENS * HEADS], LOWEST, tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        low, high = (
            (begin, whole) if part == 0 else ((whole, ragged) if part == 1 else (ragged, end))
        )
        for strip in range(low, high):
            key_position = strip * STRIP + tl.arange(0, STRIP)
            exists = key_position < context
            block = tl.load(table + key_position // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
            slot = key_position % BLOCK_TOKENS
            at = (block * block_stride + slot * HEAD_DIM)[:, None] + dims[None, :]
            # Zeros: a weight of zero times a NaN is a NaN.
            here = exists[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + at, mask=here, other=0)
            v = tl.load(values + at, mask=here, other=0)
            if FP8:
                k, v = _widen(k).to(q.dtype), _widen(v).to(q.dtype)
            scores = tl.dot(q, tl.trans(k))
            at_scale = block * scale_block_stride + slot
            if FP8:
                scores *= 256.0 * tl.load(key_scales + at_scale, mask=exists, other=0.0)[None, :]
            factor = to_exponent
            if SOFTCAP:
                scores = cap - 2 * cap / (tl.exp2(scores * to_exponent) + 1)  # cap * tanh
                factor = 1.0
            if part != 1:
                seen = key_position[None, :] <= position[:, None]
                if WINDOW > 0:
                    seen &= key_position[None, :] > position[:, None] - WINDOW
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1) * factor)
            # Multiply-adds: masked and whole strips must round alike.
            weights = tl.exp2(tl.fma(scores, factor, -higher[:, None]))
            shrink = tl.exp2(top - higher)
            total = tl.fma(total, shrink, tl.sum(weights, 1))
            if FP8:
                weights *= 256.0 * tl.load(value_scales + at_scale, mask=exists, other=0.0)[None, :]
            mixed = tl.dot(weights.to(q.dtype), v, mixed * shrink[:, None])
            top = higher

    at_out = out + (token_row * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
    tl.store(at_out, (mixed / total[:, None]).to(out.dtype.element_ty), mask=valid)


@triton.jit
def _widen(fp8):
    # e4m3 bits as fp16 numbers, divided by 256
    bits = fp8.to(tl.uint16)
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
