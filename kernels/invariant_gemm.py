"""y = x W^T with bits that do not depend on how many rows x has, nor on which (Triton).

Every element is one chain of tensor-core products over K, 16 columns at a time, into one fp32
accumulator: K is never split. Rounded once, after bias and residual.

Grid: one program per tile, at most as many as the GPU holds; each takes further tiles (persistent),
down `GROUP` row tiles before the next outputs, so that programs share weights in L2. Source:
Triton's tutorial 09.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.launch import cdiv, dependent, pdl_works, processors, wait_for_previous

__all__ = ["FEW_OUTPUTS", "FEW_ROWS", "MANY_ROWS", "MIDDLE", "InvariantTile", "invariant_linear"]

_BK = 64
GROUP = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class InvariantTile:
    """A tile: rows of x, outputs, warps, 64-column stages in flight, programs per SM."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int


# While a GPU holds all its tiles at once: the weights' bytes count.
FEW_OUTPUTS = InvariantTile(64, 64, warps=4, stages=6, resident=2)
# Up to 64 rows of a weight of many outputs.
FEW_ROWS = InvariantTile(64, 128, warps=4, stages=4, resident=2)
# Where the largest tiles would leave a third of the GPU without one.
MIDDLE = InvariantTile(128, 128, warps=8, stages=4, resident=1)
MANY_ROWS = InvariantTile(128, 256, warps=8, stages=4, resident=1)
_BEFORE_HOPPER = InvariantTile(128, 128, warps=8, stages=3, resident=1)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: InvariantTile | None = None,
) -> torch.Tensor:
    """Return x [M, K] W^T + bias + residual [M, N]; weight [N, K]; `out` may be the residual.

    bf16 or fp16, all of one type, columns contiguous; K is a multiple of 8.
    """
    (m, k), n = x.shape, weight.shape[0]
    if k % 8:
        raise ValueError(f"{k} columns of a weight, must be a multiple of 8")
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    hopper = pdl_works(x.device)
    if tile is None:
        tile = _tile(m, n, processors(x.device, 4), hopper)
    x_tiles = weight_tiles = None
    if hopper and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0:
        x_tiles = TensorDescriptor.from_tensor(x, [tile.block_m, _BK])
        weight_tiles = TensorDescriptor.from_tensor(weight, [tile.block_n, _BK])
    _invariant_kernel[(min(_tiles(m, n, tile), tile.resident * processors(x.device, 4)),)](
        x,
        x_tiles,
        weight,
        weight_tiles,
        bias,
        residual,
        out,
        m,
        n,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K=k,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=_BK,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x.device),
    )
    return out


def _tile(m: int, n: int, processors: int, hopper: bool) -> InvariantTile:
    # H200, us: o 16.5 at 128 rows with FEW_OUTPUTS, 41.7 with MANY_ROWS; gate-up 59.0 at 64 with
    # FEW_ROWS, 63.7 with FEW_OUTPUTS; down 85 at 512 with MIDDLE, 133 with MANY_ROWS.
    if not hopper:
        return FEW_OUTPUTS if m <= FEW_OUTPUTS.block_m else _BEFORE_HOPPER
    if _tiles(m, n, FEW_OUTPUTS) <= FEW_OUTPUTS.resident * processors:
        return FEW_OUTPUTS
    if m <= FEW_ROWS.block_m:
        return FEW_ROWS
    return MIDDLE if 3 * _tiles(m, n, MANY_ROWS) < 2 * processors else MANY_ROWS


def _tiles(m: int, n: int, tile: InvariantTile) -> int:
    return cdiv(m, tile.block_m) * cdiv(n, tile.block_n)


@triton.jit(do_not_specialize=["M"])
def _invariant_kernel(
    x,
    x_tiles,
    weight,
    weight_tiles,
    bias,
    residual,
    out,
    M,
    N,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tiles = tl.cdiv(M, BM)
    tiles = row_tiles * tl.cdiv(N, BN)
    columns = tl.arange(0, BK)
    wait_for_previous(PDL)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row_tile, output_tile = _place(tile, row_tiles, tiles // row_tiles)
        m = row_tile * BM + tl.arange(0, BM)
        n = output_tile * BN + tl.arange(0, BN)
        x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride
        weight_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            if x_tiles is None:
                k = (k0 + columns)[None, :]
                x_tile = (
                    tl.load(x_rows + k)
                    if K % BK == 0
                    else tl.load(x_rows + k, mask=k < K, other=0.0)
                )
                w = (
                    tl.load(weight_rows + k)
                    if K % BK == 0
                    else tl.load(weight_rows + k, mask=k < K, other=0.0)
                )
            else:
                x_tile = x_tiles.load([row_tile * BM, k0])
                w = weight_tiles.load([output_tile * BN, k0])
            acc = tl.dot(x_tile, w.T, acc)
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
        rows = m.to(tl.int64)[:, None]
        if residual is not None:
            acc += tl.load(
                residual + rows * residual_stride + n[None, :], mask=inside, other=0.0
            ).to(tl.float32)
        tl.store(out + rows * out_stride + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _place(tile, row_tiles, output_tiles):
    # (row tile, output tile) number `tile`: down a group of row tiles, then the next outputs
    group = tile // (GROUP * output_tiles)
    within = tile - group * GROUP * output_tiles
    rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    return group * GROUP + within % rows, within // rows
