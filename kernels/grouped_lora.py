"""Low-rank adapters beside a linear layer on a GPU: y += B (A x), each row with its own. Triton.

- `shrink`, x -> A x. Grid: tiles of rows x tiles of A's rows x parts of K, whose sums stay apart.
- `expand` adds up the parts in order and adds B (A x) to y. Grid: tiles of rows x tiles of columns.

A row's adapter is read from device memory, so both fit a CUDA graph. A program loops over the
adapters between the lowest and the highest of its rows, which come sorted. A row's bits depend on
the tiles alone. Every program waits (`gdc_wait`) before it ends, also an idle one: else its
successor would run into what is computed before. On a CPU: `PackedLora` of
`kernels/decoder_layer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrelay.kernels.launch import cdiv, dependent, power_of_2, wait_for_previous

__all__ = ["INVARIANT_ROWS", "LoraTiles", "default_tiles", "expand", "shrink"]

# Serves all numbers of rows in batch-invariant engines.
INVARIANT_ROWS = 16
_FEW_ROWS = 256
_MANY_ROWS = 2048
_PART_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """A program's share: `rows` of x, one of `split` parts of K, `columns` of y."""

    rows: int
    split: int
    columns: int


def default_tiles(rows: int, k: int) -> LoraTiles:
    """Return one of three kinds, compiled before a node's first request."""
    parts = max(1, k // _PART_COLUMNS)
    if rows <= _FEW_ROWS:
        return LoraTiles(16, min(16, parts), 128)
    return LoraTiles(64, min(4, parts) if rows <= _MANY_ROWS else 1, 128)


def shrink(
    x: torch.Tensor,
    down: torch.Tensor,
    adapters: torch.Tensor,
    *,
    tiles: LoraTiles,
) -> torch.Tensor:
    """Return down[a] x of rows with adapter a, fp32 [parts, T, C], to be added up by `expand`.

    x [T, K] (rows may be strided), down [adapters, C, K], adapters int32 [T], -1 for none. C is a
    multiple of 16. Tiles without an adapter are not written.
    """
    count, k = x.shape
    stacked = down.shape[1]
    assert stacked % 16 == 0
    low = torch.empty(tiles.split, count, stacked, dtype=torch.float32, device=x.device)
    columns = _divisor(stacked)
    if count:
        _shrink[(cdiv(count, tiles.rows) * (stacked // columns) * tiles.split,)](
            x,
            x.stride(0),
            down,
            adapters,
            low,
            count,
            K=k,
            C=stacked,
            SPLIT=tiles.split,
            BM=tiles.rows,
            BC=columns,
            BK=max(16, min(128, power_of_2(k))),
            num_warps=4,
            num_stages=3,
            **dependent(x.device),
        )
    return low


def expand(
    low: torch.Tensor,
    up: torch.Tensor,
    adapters: torch.Tensor,
    y: torch.Tensor,
    widths: Sequence[int],
    *,
    tiles: LoraTiles,
) -> torch.Tensor:
    """Add up[a] low to rows of y [T, N] with adapter a, in place; fp32 sums rounded once.

    Projection i takes the i-th `rank` columns of low. up [adapters, N, rank]; `widths`: y's columns
    of at most three projections. y's rows may be strided.
    """
    split, count, stacked = low.shape
    rank = up.shape[2]
    assert len(widths) <= 3
    first, second, third = (*widths, 0, 0)[:3]
    programs = sum(cdiv(width, tiles.columns) for width in widths)
    if count:
        _expand[(cdiv(count, tiles.rows) * programs,)](
            low,
            up,
            adapters,
            y,
            y.stride(0),
            count,
            N0=first,
            N1=second,
            N2=third,
            R=rank,
            C=stacked,
            SPLIT=split,
            BM=tiles.rows,
            BN=tiles.columns,
            BR=_divisor(rank),
            num_warps=4,
            num_stages=1,
            **dependent(y.device),
        )
    return y


def _divisor(size: int) -> int:
    return max(width for width in (16, 32, 64) if size % width == 0)


@triton.jit(do_not_specialize=["count"])
def _shrink(
    x,
    x_stride,
    down,
    adapters,
    low,
    count,
    K: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid: (cdiv(count, BM) * C // BC * SPLIT,)
    part = tl.program_id(0) % SPLIT
    rest = tl.program_id(0) // SPLIT
    column = rest % (C // BC) * BC + tl.arange(0, BC)
    row = rest // (C // BC) * BM + tl.arange(0, BM)
    inside = row < count
    wait_for_previous(PDL)
    adapter = tl.load(adapters + row, mask=inside, other=-1)
    highest = tl.max(adapter)
    lowest = tl.min(tl.where(adapter < 0, highest, adapter))
    if highest >= 0:
        steps: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
        rows = x + row.to(tl.int64)[:, None] * x_stride
        total = tl.zeros((BM, BC), tl.float32)
        for each in range(lowest, highest + 1):
            mine = adapter == each
            if tl.max(mine.to(tl.int32)) > 0:
                matrix = down + (each * C + column).to(tl.int64)[None, :] * K
                sums = tl.zeros((BM, BC), tl.float32)
                for step in range(steps):
                    k = (part * steps + step) * BK + tl.arange(0, BK)
                    values = tl.load(
                        rows + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0
                    )
                    weights = tl.load(matrix + k[:, None], mask=(k < K)[:, None], other=0.0)
                    sums = tl.dot(values, weights, sums, input_precision="ieee")
                # A NaN in a matrix is its own rows' alone.
                total = tl.where(mine[:, None], sums, total)
        place = (part.to(tl.int64) * count + row)[:, None] * C + column[None, :]
        tl.store(low + place, total, mask=inside[:, None])


@triton.jit(do_not_specialize=["count"])
def _expand(
    low,
    up,
    adapters,
    y,
    y_stride,
    count,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid: (cdiv(count, BM) * the projections' cdiv(N, BN),)
    first_tiles: tl.constexpr = (N0 + BN - 1) // BN
    second_tiles: tl.constexpr = (N1 + BN - 1) // BN
    third_tiles: tl.constexpr = (N2 + BN - 1) // BN
    third: tl.constexpr = first_tiles + second_tiles
    tiles: tl.constexpr = third + third_tiles
    tile = tl.program_id(0) % tiles
    row = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    projection = (tile >= first_tiles).to(tl.int32) + (tile >= third).to(tl.int32)
    tile -= tl.where(projection == 0, 0, tl.where(projection == 1, first_tiles, third))
    first = tl.where(projection == 0, 0, tl.where(projection == 1, N0, N0 + N1))
    width = tl.where(projection == 0, N0, tl.where(projection == 1, N1, N2))
    column = tile * BN + tl.arange(0, BN)
    here = column < width
    column += first
    inside = row < count
    wait_for_previous(PDL)
    adapter = tl.load(adapters + row, mask=inside, other=-1)
    highest = tl.max(adapter)
    lowest = tl.min(tl.where(adapter < 0, highest, adapter))
    if highest >= 0:
        outputs: tl.constexpr = N0 + N1 + N2
        total = tl.zeros((BM, BN), tl.float32)
        for each in range(lowest, highest + 1):
            mine = adapter == each
            if tl.max(mine.to(tl.int32)) > 0:
                matrix = up + (each * outputs + column).to(tl.int64)[None, :] * R
                sums = tl.zeros((BM, BN), tl.float32)
                for start in range(0, R, BR):
                    r = start + tl.arange(0, BR)
                    source = low + row.to(tl.int64)[:, None] * C + (projection * R + r)[None, :]
                    values = tl.zeros((BM, BR), tl.float32)
                    for part in range(SPLIT):
                        values += tl.load(
                            source + part * count.to(tl.int64) * C, mask=mine[:, None], other=0.0
                        )
                    weights = tl.load(matrix + r[:, None], mask=here[None, :], other=0.0)
                    sums = tl.dot(values.to(weights.dtype), weights, sums, input_precision="ieee")
                total = tl.where(mine[:, None], sums, total)
        target = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
        touched = (adapter >= 0)[:, None] & here[None, :]
        value = tl.load(target, mask=touched, other=0.0).to(tl.float32) + total
        tl.store(target, value.to(y.dtype.element_ty), mask=touched)
