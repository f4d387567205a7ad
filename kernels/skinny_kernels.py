"""The two Triton kernels of `kernels/skinny_gemm.py`, which explains them and launches them.

M rows of x, N outputs, K columns; a program has BN weight rows, BM rows of x, BK columns at a time.
A gated weight is [2 N, K]: N gate rows, then N up rows; a program has BN of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrelay.kernels.fused_elementwise import activate

__all__ = ["PREFETCH_PIECE", "tile_kernel", "vector_kernel"]

PREFETCH_PIECE = tl.constexpr(512)


@triton.jit
def vector_kernel(
    x,
    weight,
    weight_scale,
    bias,
    residual,
    out,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
    FP8_INSTRUCTION: tl.constexpr,
):
    """Compute x [1, K] -> out [1, N]. Grid (cdiv(N, BN),).

    x and weight come as words of four columns: int64, or int32 for fp8, packed up to their use,
    which leaves registers for loads under way.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    WORDS: tl.constexpr = K // 4
    BW: tl.constexpr = BK // 4
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row_index = tl.minimum(n, N - 1).to(tl.int64)
    rows, up_rows = weight + row_index * WORDS, weight + (row_index + N) * WORDS
    rows, up_rows = rows[:, None], up_rows[:, None]
    columns = tl.max_contiguous(tl.arange(0, BW), 2)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # A chunk is asked for before the one ahead of it is used; the first, before the wait.
    ahead = _words_once(rows, columns, WORDS)
    up_ahead = _words_once(up_rows, columns, WORDS) if GATE is not None else ahead
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((BN, BW), tl.float32)
    up_acc = tl.zeros((BN, BW), tl.float32)
    for begin in range(0, WORDS, BW):
        words, up_words = ahead, up_ahead
        k = begin + columns
        ahead = _words_once(rows, k + BW, WORDS)
        up_ahead = _words_once(up_rows, k + BW, WORDS) if GATE is not None else ahead
        four = _four_of_16_bits(tl.load(x + k, mask=k < WORDS, other=0), DTYPE)
        acc = _add_products(acc, words, four, DTYPE, FP8_INSTRUCTION)
        if GATE is not None:
            up_acc = _add_products(up_acc, up_words, four, DTYPE, FP8_INSTRUCTION)

    acc = tl.sum(acc, axis=1, keep_dims=True)
    up_acc = tl.sum(up_acc, axis=1, keep_dims=True) if GATE is not None else acc
    after = (None, weight_scale, bias, residual, 0, out, 0)
    _finish(acc, up_acc, tl.arange(0, 1), n, 1, N, after, GATE)


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x,
    x_tiles,
    x_scale,
    weight,
    weight_tiles,
    weight_scale,
    bias,
    residual,
    out,
    partials,
    arrivals,
    M,
    N,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute x [M, K] -> out [M, N]. Grid (cdiv(N, BN) * SPLIT,).

    With x_tiles [BM, BK] and weight_tiles [BN, BK], descriptors, loads go through the TMA.
    """
    CHUNK: tl.constexpr = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    # Hopper adds fp8 products with 14 bits; after so many columns they go to fp32.
    FEW_BITS: tl.constexpr = BK if x_scale is not None else None
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    begin = part * CHUNK
    end = tl.minimum(begin + CHUNK, K)
    m = tl.arange(0, BM)
    n = tile * BN + tl.arange(0, BN)
    row_index = tl.minimum(n, N - 1).to(tl.int64)
    rows, up_rows = weight + row_index * K, weight + (row_index + N) * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch(rows + begin, PREFETCH)
            if GATE is not None:
                _prefetch(up_rows + begin, PREFETCH)
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((BN, BM), tl.float32)
    up_acc = tl.zeros((BN, BM), tl.float32)
    columns = tl.arange(0, BK)
    for k0 in range(begin, end, BK):
        if x_tiles is None:
            k = k0 + columns
            x_mask = (m < M)[:, None] if K % BK == 0 else (m < M)[:, None] & (k < K)[None, :]
            x_tile = tl.load(x + m[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
            w = _weights(rows, k, K, K % BK == 0)
            up_w = _weights(up_rows, k, K, K % BK == 0) if GATE is not None else w
        else:
            x_tile = x_tiles.load([0, k0])
            w = weight_tiles.load([tile * BN, k0])
            up_w = weight_tiles.load([N + tile * BN, k0]) if GATE is not None else w
        acc = tl.dot(w, x_tile.T, acc, max_num_imprecise_acc=FEW_BITS)
        if GATE is not None:
            up_acc = tl.dot(up_w, x_tile.T, up_acc, max_num_imprecise_acc=FEW_BITS)

    after = (x_scale, weight_scale, bias, residual, residual_stride, out, out_stride)
    if SPLIT == 1:
        _finish(acc, up_acc, m, n, M, N, after, GATE)
    elif _leave_sums(acc, tile, part, partials, arrivals, BN, BM, SPLIT) == SPLIT - 1:
        acc = _all_sums(tile, partials, arrivals, BN, BM, SPLIT)
        _finish(acc, acc, m, n, M, N, after, GATE)


@triton.jit
def _leave_sums(
    acc, tile, part, partials, arrivals, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr
):
    # Stores a part's BN x BM sums; returns how many parts were there before.
    place = partials + (tile * SPLIT + part) * BN * BM
    tl.store(place + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :], acc)
    tl.debug_barrier()  # all have stored
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel")


@triton.jit
def _all_sums(tile, partials, arrivals, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    # all parts of a tile, added in the order of K
    acc = tl.zeros((BN, BM), tl.float32)
    for part in tl.static_range(SPLIT):
        place = partials + (tile * SPLIT + part) * BN * BM
        acc += tl.load(
            place + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :], cache_modifier=".cg"
        )
    tl.store(arrivals + tile, 0)
    return acc


@triton.jit
def _finish(acc, up, m, n, M, N, after, GATE: tl.constexpr):
    # sums acc and up [BN, BM] of outputs n [BN] and rows m [BM] of x -> out
    x_scale, weight_scale, bias, residual, residual_stride, out, out_stride = after
    rows = tl.minimum(n, N - 1)
    if x_scale is not None:
        scale = tl.load(x_scale + m, mask=m < M, other=0.0)[None, :]
        acc *= scale
        up *= scale
    acc = _scale_and_bias(acc, rows, weight_scale, bias)
    if GATE is not None:
        acc = activate(acc, GATE) * _scale_and_bias(up, N + rows, weight_scale, bias)
    y = tl.trans(acc)
    inside = (m < M)[:, None] & (n < N)[None, :]
    m = m.to(tl.int64)[:, None]
    if residual is not None:
        y += tl.load(residual + m * residual_stride + n[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + m * out_stride + n[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_and_bias(acc, rows, weight_scale, bias):
    if weight_scale is not None:
        acc *= tl.load(weight_scale + rows)[:, None]
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    return acc


@triton.jit
def _weights(rows, k, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(rows[:, None] + k[None, :])
    return tl.load(rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)


@triton.jit
def _prefetch(rows, BYTES: tl.constexpr):
    pieces = tl.arange(0, BYTES // PREFETCH_PIECE) * PREFETCH_PIECE
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
        "=r,l,r",
        [rows.to(tl.int64)[:, None] + pieces[None, :], PREFETCH_PIECE],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _words_once(rows, k, WORDS: tl.constexpr):
    return tl.load(rows + k, mask=k < WORDS, other=0, eviction_policy="evict_first")


@triton.jit
def _add_products(acc, words, four, DTYPE: tl.constexpr, FP8_INSTRUCTION: tl.constexpr):
    weights = (
        _four_of_16_bits(words, DTYPE)
        if words.dtype == tl.int64
        else _four_of_8_bits(words, FP8_INSTRUCTION)
    )
    for i in tl.static_range(4):
        acc += weights[i] * four[i]
    return acc


@triton.jit
def _four_of_16_bits(words, DTYPE: tl.constexpr):
    return (
        _low(words, DTYPE),
        _low(words >> 16, DTYPE),
        _low(words >> 32, DTYPE),
        _low(words >> 48, DTYPE),
    )


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _four_of_8_bits(words, FP8_INSTRUCTION: tl.constexpr):
    if FP8_INSTRUCTION:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b, c, d; .reg .b32 ab, cd; mov.b32 {a, b}, $4; "
            "cvt.rn.f16x2.e4m3x2 ab, a; cvt.rn.f16x2.e4m3x2 cd, b; mov.b32 {a, b}, ab; mov.b32 "
            "{c, d}, cd; "
            "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return (
        _wide_e4m3(words),
        _wide_e4m3(words >> 8),
        _wide_e4m3(words >> 16),
        _wide_e4m3(words >> 24),
    )


@triton.jit
def _wide_e4m3(words):
    # The lowest byte; fp16's exponent has a bias greater by 8.
    return _low(((words & 0x80) << 8) | ((words & 0x7F) << 7), tl.float16) * 256.0
