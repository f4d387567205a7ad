"""y = x W^T for few rows of x, as fast as weights can be read (Triton).

Three kernels, which add in fp32 and round once (`kernels/skinny_kernels.py`,
`kernels/skinny_hopper.py`):

- `vector_kernel`, one row. Grid: one program per `block_n` weight rows.
- `ring_kernel`, up to 64 rows of 16 bits on Hopper: one warp loads, four multiply.
- `tile_kernel`, any rows. Grid: weight tiles x split. acc[block_n, BM] = W[block_n, block_k]
  x^T[block_k, BM], so that 64 weight rows fill a wgmma whatever BM is. Programs that share the K of
  a tile: the last to arrive adds all sums in the order of K and resets the counter.

In the same launch: scales, bias, gated activation or residual. Not RMSNorm: each program would norm
all of x. With dependent launch (Hopper on) a kernel of 8 to 55 us saves 2 to 4 us: its programs fetch
their first weights before they wait for the kernel before.

A row's bits do not depend on other rows, but on their number where it chooses kernel, `block_k` or
`split`. One workspace per GPU: calls must be on one stream, the first not under capture.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.launch import capability, cdiv, dependent, pdl_works, power_of_2, processors
from kvrelay.kernels.skinny_kernels import PREFETCH_PIECE, tile_kernel, vector_kernel

__all__ = [
    "MAX_ROWS",
    "RING_ROWS",
    "Activation",
    "RingTile",
    "TensorTile",
    "Tile",
    "VectorTile",
    "default_tile",
    "fits_ring",
    "skinny_linear",
]

Activation = Literal["silu", "gelu_tanh"]

MAX_ROWS = 128

# At 128, x would be as many bytes as the weight.
RING_ROWS = 64

# fp32 numbers (32 MiB): split x N x BM
_PARTIAL_SUMS = 8 << 20
_MOST_TILES = 4096
_RING_BYTES = 224 << 10  # of an SM's 227 KB
_RING_REGISTERS = 128  # two programs of 256 threads share an SM


@dataclass(frozen=True, slots=True)
class VectorTile:
    """A tile of the vector kernel; with a gate, block_n gate rows and as many up rows."""

    block_n: int
    block_k: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class TensorTile:
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 5
    # programs that share K; 1 with a gate
    split: int = 1
    tma: bool = False
    # bytes of a weight row into L2 before `gdc_wait`: 0, or a power of two from 512 on
    prefetch: int = 1024


@dataclass(frozen=True, slots=True)
class RingTile:
    # weight rows, a multiple of 16 up to 256; with a gate half are its own
    rows: int
    split: int
    slots: int


Tile = VectorTile | TensorTile | RingTile


def default_tile(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> Tile:
    """Return the tile for x [rows, K], best in a sweep on an H200 over Llama-3.1-8B's weights.

    Pipelines of the tile kernel have about 100 KB, so that two programs share an SM.
    """
    (rows, k), device, fp8 = x.shape, x.device, weight.dtype == torch.float8_e4m3fn
    n = len(weight) // 2 if gated else len(weight)
    if x.dtype == torch.float8_e4m3fn:
        return _fp8_tile(rows, n, k, gated, device)
    if rows == 1 and fp8:
        return VectorTile(2, 4096, warps=8) if gated else VectorTile(4, 2048)
    if rows == 1:
        return VectorTile(2, min(2048, max(1024, power_of_2(k) // 2)), warps=4 if k > 8192 else 8)
    if rows <= RING_ROWS and fits_ring(weight) and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0:
        return _ring_tile(max(16, power_of_2(rows)), len(weight), k, gated, device)
    tma = pdl_works(device)
    if gated:
        if rows <= 16:
            return TensorTile(32, 128, stages=5, tma=tma, prefetch=0)
        if rows <= 32:
            return TensorTile(64, 128, stages=3, tma=tma)
        return TensorTile(128, 64, warps=8, stages=4, tma=tma)
    if rows > 32:
        return TensorTile(64, 64, stages=5, split=_split(n, k, 64, 64, 4, device))
    if rows > 16:
        return TensorTile(64, 128, stages=4, split=_split(n, k, 64, 128, 4, device))
    return TensorTile(64, 256, stages=3, split=_split(n, k, 64, 256, 2, device), tma=tma)


@functools.cache
def _ring_tile(block_m: int, n: int, k: int, gated: bool, device: torch.device) -> RingTile:
    # The fewest bytes for the busiest SM. Adding four parts takes longer than it saves from 32 rows
    # on. Cached for steps without a graph.
    steps, sms = cdiv(k, 64), processors(device, 132)
    splits = (1,) if gated else (1, 2, 4) if block_m == 16 else (1, 2)

    def per_sm(of: int, split: int) -> int:
        return int(cdiv(cdiv(n, of) * split, sms))

    def cost(shape: tuple[int, int]) -> int:
        of, split = shape
        loaded = cdiv(steps, split) * 128 * (of + block_m)
        left = 4 * of * block_m * (1 + split) if split > 1 else 0
        return per_sm(of, split) * int(loaded + left)

    of, split = min(((of, split) for of in range(64, 129, 16) for split in splits), key=cost)
    return RingTile(of, split, _slots(of, block_m, min(per_sm(of, split), 2)))


def _space(rows: int) -> int:
    # whole products of the tensor core, a power of two
    return max(64, int(power_of_2(rows)))


def _slots(rows: int, block_m: int, per_sm: int) -> int:
    return int(_RING_BYTES // per_sm // (128 * (_space(rows) + block_m)))


def _fp8_tile(rows: int, n: int, k: int, gated: bool, device: torch.device) -> Tile:
    # As many bytes under way, hence twice the columns.
    tma = pdl_works(device)
    if gated:
        if rows <= 16:
            return TensorTile(64, 256, stages=3, tma=tma)
        if rows <= 32:
            return TensorTile(64, 128, stages=5, tma=tma)
        return TensorTile(64, 128, warps=8, stages=4, tma=tma)
    if rows <= 32:
        return TensorTile(64, 256, stages=3, split=_split(n, k, 64, 256, 4, device), tma=tma)
    return TensorTile(64, 128, stages=4, split=_split(n, k, 64, 128, 4, device), tma=tma)


def _split(n: int, k: int, block_n: int, block_k: int, most: int, device: torch.device) -> int:
    # Two or three programs on each SM, if their pipelines fill.
    return int(
        max(1, min(3 * processors(device, 132) // cdiv(n, block_n), k // (4 * block_k), most))
    )


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate: Activation | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return x [M, K] W^T and what goes with it, [M, N], for 1 to MAX_ROWS rows.

    In this order: times x_scale [M, 1] and weight_scale [N], fp32, of fp8; plus bias [N]; plus
    residual [M, N] (`out` may be that). With a `gate`, weight [2 N, K], scales and bias have the
    gate's rows first, and the result is act(gate) * up. x, residual, out: bf16 or fp16, columns
    contiguous. weight [N, K]: of x's type, contiguous, K a multiple of 8; or float8_e4m3fn, K a
    multiple of 16, and then x of more than one row too, with x_scale and `out`.
    """
    rows, k = x.shape
    n = weight.shape[0] // (1 if gate is None else 2)
    if tile is None:
        tile = default_tile(x, weight, gated=gate is not None)
    if not isinstance(tile, VectorTile):
        _check_space(rows, len(weight), tile)
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if isinstance(tile, RingTile):
        return _through_ring(x, weight, bias, residual, gate, out, tile)
    shape = {"K": k, "BN": tile.block_n, "BK": tile.block_k, "GATE": gate}
    options = {"num_warps": tile.warps, **dependent(x.device)}
    programs = cdiv(n, tile.block_n)
    if isinstance(tile, VectorTile):
        words = weight.view(torch.int64 if weight.dtype == x.dtype else torch.int32)
        vector_kernel[(programs,)](
            x[0].view(torch.int64),
            words,
            weight_scale,
            bias,
            residual,
            out,
            n,
            FP8_INSTRUCTION=capability(x.device) >= (8, 9),
            **shape,
            **options,
        )
        return out
    block_m = max(16, power_of_2(rows))
    x_tiles, weight_tiles = _descriptors(x, weight, block_m, tile)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0))
    shape |= {"BM": block_m, "SPLIT": tile.split, "PREFETCH": _prefetch_bytes(tile, weight)}
    tile_kernel[(programs * tile.split,)](
        x,
        x_tiles,
        x_scale,
        weight,
        weight_tiles,
        weight_scale,
        bias,
        residual,
        out,
        *_workspace(x.device),
        rows,
        n,
        *strides,
        num_stages=tile.stages,
        **shape,
        **options,
    )
    return out


def _through_ring(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: Activation | None,
    out: torch.Tensor,
    tile: RingTile,
) -> torch.Tensor:
    from kvrelay.kernels.skinny_hopper import COLUMNS, ring_descriptors, ring_kernel

    rows, k = x.shape
    block_m = max(16, power_of_2(rows))
    ring_kernel[(cdiv(len(weight), tile.rows) * tile.split,)](
        *ring_descriptors(x, weight, block_m=block_m, rows=tile.rows, gated=gate is not None),
        bias,
        residual,
        out,
        *_workspace(x.device),
        rows,
        out.shape[1],
        0 if residual is None else residual.stride(0),
        out.stride(0),
        STEPS=cdiv(k, COLUMNS.value),
        SPLIT=tile.split,
        ROWS=tile.rows,
        SPACE=_space(tile.rows),
        SLOTS=tile.slots,
        GATE=gate,
        num_warps=4,
        maxnreg=_RING_REGISTERS,
        **dependent(x.device),
    )
    return out


def _check_space(rows: int, outputs: int, tile: TensorTile | RingTile) -> None:
    of = tile.rows if isinstance(tile, RingTile) else tile.block_n
    space = _space(of) if isinstance(tile, RingTile) else of
    if tile.split > 1:
        tiles = cdiv(outputs, of)
        assert tiles <= _MOST_TILES
        assert tiles * tile.split * space * max(16, power_of_2(rows)) <= _PARTIAL_SUMS


def _descriptors(
    x: torch.Tensor, weight: torch.Tensor, block_m: int, tile: TensorTile
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    aligned = all(
        t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (x, weight)
    )
    if not tile.tma or not aligned:
        return None, None
    return (
        TensorDescriptor.from_tensor(x, [block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
    )


def _prefetch_bytes(tile: TensorTile, weight: torch.Tensor) -> int:
    # `tile.prefetch`, or what the last program that shares K has of a row
    k = weight.shape[1]
    chunk = cdiv(cdiv(k, tile.block_k), tile.split) * tile.block_k
    last = (k - chunk * (tile.split - 1)) * weight.element_size()
    size = min(tile.prefetch, last)
    return 1 << (size.bit_length() - 1) if size >= PREFETCH_PIECE.value else 0


@functools.cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # Sums, and each tile's arrivals, 0 between launches.
    sums = torch.empty(_PARTIAL_SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def fits_ring(weight: torch.Tensor) -> bool:
    """Return whether the ring kernel serves this weight: 16 bits, Hopper, whole groups."""
    whole = len(weight) % 16 == 0 and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
    on_hopper = pdl_works(weight.device) and capability(weight.device) == (9, 0)
    return whole and weight.dtype in (torch.bfloat16, torch.float16) and on_hopper
