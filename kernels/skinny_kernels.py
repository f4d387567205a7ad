"""The two Triton kernels of `kernels/skinny_gemm.py`, which explains them and launches them.

Names in capitals are known when a kernel is compiled. M rows of x, N outputs, K columns; a program has BN weight rows,
BM rows of x, and BK columns at a time. A gated weight is [2 N, K]: N gate rows, then N up rows, and a program has BN of
each. Norm, gate, bias and so on are there if their argument is not None.
"""

# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["PREFETCH_PIECE", "tile_kernel", "vector_kernel"]

PREFETCH_PIECE = tl.constexpr(512)
"""Bytes of one prefetch instruction. A warp issues those of its threads one by one, so they should not be many."""


@triton.jit
def vector_kernel(
    x, weight, weight_scale, norm_weight, bias, residual, out, N, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PLUS_ONE: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [1, K] -> out [1, N]. Grid (cdiv(N, BN),)."""
    NORM: tl.constexpr = norm_weight is not None
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row_index = tl.minimum(n, N - 1).to(tl.int64)
    rows, up_rows = weight + row_index * K, weight + (row_index + N) * K
    rows, up_rows = rows[:, None], up_rows[:, None]
    columns = tl.arange(0, BK)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Two chunks of weights are on their way at any time. The first is asked for before the wait.
    ahead = _weights_once(rows, columns, K)
    up_ahead = _weights_once(up_rows, columns, K) if GATE is not None else ahead
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((BN, BK), tl.float32)
    up_acc = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((1, BK), tl.float32)
    for begin in range(0, K, BK):
        w, up_w = ahead, up_ahead
        k = begin + columns
        ahead = _weights_once(rows, k + BK, K)
        up_ahead = _weights_once(up_rows, k + BK, K) if GATE is not None else ahead
        row = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += row * row
            row *= _norm_factors(norm_weight, k, K, PLUS_ONE).to(tl.float32)
        acc += _wide(w) * row
        if GATE is not None:
            up_acc += _wide(up_w) * row

    acc = tl.sum(acc, axis=1, keep_dims=True)
    up_acc = tl.sum(up_acc, axis=1, keep_dims=True) if GATE is not None else acc
    squares = tl.sum(squares, axis=1)
    m = tl.arange(0, 1)
    _finish(
        acc, up_acc, squares, m, n, 1, N, weight_scale, bias, residual, out, 0, 0, eps, K, NORM, GATE
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x, x_tiles, weight, weight_tiles, weight_scale, norm_weight, bias, residual, out, partials, arrivals,
    M, N, x_stride, residual_stride, out_stride, eps,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PREFETCH: tl.constexpr,
    PLUS_ONE: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [M, K] -> out [M, N]. Grid (cdiv(N, BN) * SPLIT,).

    With x_tiles [BM, BK] and weight_tiles [BN, BK], descriptors of x and weight, loads go through the TMA.
    """
    NORM: tl.constexpr = norm_weight is not None
    CHUNK: tl.constexpr = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
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
    squares = tl.zeros((BM,), tl.float32)
    columns = tl.arange(0, BK)
    if NORM:
        factors = _norm_factors(norm_weight, begin + columns, end, PLUS_ONE)
    for k0 in range(begin, end, BK):
        k = k0 + columns
        if x_tiles is None:
            x_mask = (m < M)[:, None] if K % BK == 0 else (m < M)[:, None] & (k < K)[None, :]
            x_tile = tl.load(x + m[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
            w = _weights(rows, k, K, K % BK == 0)
            up_w = _weights(up_rows, k, K, K % BK == 0) if GATE is not None else w
        else:
            x_tile = x_tiles.load([0, k0])
            w = weight_tiles.load([tile * BN, k0])
            up_w = weight_tiles.load([N + tile * BN, k0]) if GATE is not None else w
        if NORM:
            wide = x_tile.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            x_tile = (wide * factors.to(tl.float32)[None, :]).to(x_tile.dtype)
            # One iteration early: this small load is not part of the pipeline.
            factors = _norm_factors(norm_weight, k + BK, end, PLUS_ONE)
        acc = tl.dot(_as_type_of(w, x_tile), x_tile.T, acc)
        if GATE is not None:
            up_acc = tl.dot(_as_type_of(up_w, x_tile), x_tile.T, up_acc)

    if SPLIT == 1:
        _finish(
            acc, up_acc, squares, m, n, M, N, weight_scale, bias, residual, out, residual_stride, out_stride, eps,
            K, NORM, GATE,
        )  # fmt: skip
    elif _leave_sums(acc, squares, tile, part, partials, arrivals, BN, BM, SPLIT, NORM) == SPLIT - 1:
        acc, squares = _all_sums(tile, partials, arrivals, BN, BM, SPLIT, NORM)
        _finish(
            acc, acc, squares, m, n, M, N, weight_scale, bias, residual, out, residual_stride, out_stride, eps,
            K, NORM, GATE,
        )  # fmt: skip


@triton.jit
def _leave_sums(
    acc, squares, tile, part, partials, arrivals,
    BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store a part's BN x BM sums, then its BM sums of squares; how many parts of this tile were there before."""
    place = partials + (tile * SPLIT + part) * (BN + 1) * BM
    m = tl.arange(0, BM)
    tl.store(place + tl.arange(0, BN)[:, None] * BM + m[None, :], acc)
    if NORM:
        tl.store(place + BN * BM + m, squares)
    tl.debug_barrier()  # all threads have stored before one of them says so
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel")


@triton.jit
def _all_sums(
    tile, partials, arrivals, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """(acc, squares) of all parts of a tile, added in the order of K; the counter is 0 again."""
    acc, squares = tl.zeros((BN, BM), tl.float32), tl.zeros((BM,), tl.float32)
    m = tl.arange(0, BM)
    for part in tl.static_range(SPLIT):
        place = partials + (tile * SPLIT + part) * (BN + 1) * BM
        acc += tl.load(place + tl.arange(0, BN)[:, None] * BM + m[None, :], cache_modifier=".cg")
        if NORM:
            squares += tl.load(place + BN * BM + m, cache_modifier=".cg")
    tl.store(arrivals + tile, 0)
    return acc, squares


@triton.jit
def _finish(
    acc, up, squares, m, n, M, N, weight_scale, bias, residual, out, residual_stride, out_stride, eps,
    K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Sums acc and up [BN, BM] of outputs n [BN] and rows m [BM] of x, with squares [BM] its sums of squares -> out."""
    rows = tl.minimum(n, N - 1)
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        acc *= scale
        up *= scale
    acc = _scale_and_bias(acc, rows, weight_scale, bias)
    if GATE is not None:
        acc = _activate(acc, GATE) * _scale_and_bias(up, N + rows, weight_scale, bias)
    y = tl.trans(acc)
    inside = (m < M)[:, None] & (n < N)[None, :]
    m = m.to(tl.int64)[:, None]
    if residual is not None:
        y += tl.load(residual + m * residual_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m * out_stride + n[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_and_bias(acc, rows, weight_scale, bias):
    """acc [BN, BM] of weight rows [BN]."""
    if weight_scale is not None:
        acc *= tl.load(weight_scale + rows)[:, None]
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    return acc


@triton.jit
def _activate(gate, ACT: tl.constexpr):
    # 0.5 g (1 + tanh(u)) = g sigmoid(2 u), with u = sqrt(2 / pi) (g + 0.044715 g^3).
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if ACT == "gelu_tanh" else gate
    return gate / (1.0 + tl.exp(-z))


@triton.jit
def _norm_factors(norm_weight, k, end, PLUS_ONE: tl.constexpr):
    factors = tl.load(norm_weight + k, mask=k < end, other=0.0)
    return factors.to(tl.float32) + 1.0 if PLUS_ONE else factors


@triton.jit
def _weights(rows, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """Weights [BN, BK] of rows [BN] (pointers) and columns k [BK]; none is beyond K if WHOLE."""
    if WHOLE:
        return tl.load(rows[:, None] + k[None, :])
    return tl.load(rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)


@triton.jit
def _weights_once(rows, k, K: tl.constexpr):
    """Weights [BN, BK] of rows [BN, 1] and columns k [1, BK]. They leave the caches first: x and norm_weight stay."""
    return tl.load(rows + k, mask=k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch(rows, BYTES: tl.constexpr):
    """Ask for the first BYTES at each of rows [BN] (pointers) in L2."""
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
def _wide(weights):
    if weights.dtype == tl.float8e4nv:
        weights = weights.to(tl.float16)
    return weights.to(tl.float32)


@triton.jit
def _as_type_of(weights, x_tile):
    """fp8 weights as x's type. By way of fp32: cvt.bf16.f16, which Triton would use, is eight times slower."""
    if weights.dtype == x_tile.dtype:
        return weights
    return _wide(weights).to(x_tile.dtype)
