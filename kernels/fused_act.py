"""Activations between the linear layers of an MLP: silu(gate) * up, gelu(gate) * up, relu; with fp8 output. Triton.

Grid: one program per row and tile of BLOCK columns. With fp8 output one program per row, as its scale needs the row's
largest magnitude: it goes over the row twice, which for I <= 32768 is one tile that stays in registers.
Arithmetic is fp32 and rounded once. Torch twins: `kernels/norm_rope_act.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fused_norm import e4m3_scale, pdl_works

__all__ = ["act_and_mul", "relu"]

MAX_ROW_TILE = 32768
Tile = tuple[int, int]
"""(columns per program, warps)."""


def act_and_mul(
    gate_up: torch.Tensor,
    act: str,
    *,
    out: torch.Tensor | None = None,
    scales_out: torch.Tensor | None = None,
    pdl: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """act(gate) * up for a fused projection gate_up [T, 2 * I], gate first -> [T, I].

    act: "silu", or "gelu_tanh" (the tanh approximation, Gemma's). Rows of gate_up and out may be strided.
    out as float8_e4m3fn needs scales_out [T, 1] fp32 (and scales_out alone makes such an `out`): the rounded product
    is divided by its row's largest magnitude / 448.
    tile: for the benchmark's sweep; None takes the tuned one.
    """
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out_dtype = gate_up.dtype if scales_out is None else torch.float8_e4m3fn
        out = torch.empty(tokens, inner, dtype=out_dtype, device=gate_up.device)
    if act not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {act!r}, must be 'silu' or 'gelu_tanh'")
    if gate_up.shape[1] % 2 or out.shape != (tokens, inner):
        raise ValueError(f"gate_up {tuple(gate_up.shape)} and out {tuple(out.shape)} do not fit")
    if gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row must be contiguous")
    if (out.dtype == torch.float8_e4m3fn) != (scales_out is not None):
        raise ValueError("fp8 output and scales_out go together")
    if scales_out is not None and (scales_out.numel() != tokens or not scales_out.is_contiguous()):
        raise ValueError(f"scales_out must be a contiguous [{tokens}, 1], is {tuple(scales_out.shape)}")
    if not tokens:
        return out
    pdl = pdl and pdl_works(gate_up.device)
    shape = {"I": inner, "GELU": act == "gelu_tanh", "PDL": pdl}
    if scales_out is None:
        block, warps = tile or _tile(tokens, inner)
        _act_and_mul[(tokens * triton.cdiv(inner, block),)](
            gate_up, out, gate_up.stride(0), out.stride(0),
            BLOCK=block, **shape, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    else:
        block, warps = tile or _row_tile(inner)
        _act_and_mul_e4m3[(tokens,)](
            gate_up, out, scales_out, gate_up.stride(0), out.stride(0),
            BLOCK=block, **shape, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


def relu(x: torch.Tensor, *, pdl: bool = False, tile: Tile | None = None) -> torch.Tensor:
    """max(x, 0) in place; x of any shape, contiguous. NaN stays NaN."""
    if not x.is_contiguous():
        raise ValueError("relu works in place on contiguous tensors")
    if x.numel():
        block, warps = tile or (1024, 4)
        pdl = pdl and pdl_works(x.device)
        _relu[(triton.cdiv(x.numel(), block),)](
            x, x.numel(), BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl
        )  # fmt: skip
    return x


def _tile(tokens: int, inner: int) -> Tile:
    """Few tokens are spread over all SMs; many are served with fewer, longer programs."""
    return (512, 2) if tokens * inner <= 1 << 20 else (2048, 4)


def _row_tile(inner: int) -> Tile:
    block = min(triton.next_power_of_2(inner), MAX_ROW_TILE)
    return block, min(max(block // 1024, 1), 32)


@triton.jit  # type: ignore[untyped-decorator]
def _activated(gate, I: tl.constexpr, column, GELU: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741, N803
    """Columns of act(gate) * up of the row at `gate`, in its dtype; zeros beyond the row."""
    inside = column < I
    g = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate + I + column, mask=inside, other=0.0).to(tl.float32)
    # 0.5 * g * (1 + tanh(z)) is g * sigmoid(2 * z).
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if GELU else g
    return (g / (1.0 + tl.exp(-z)) * up).to(gate.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _act_and_mul(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    gate_up_stride,
    out_stride,
    I: tl.constexpr,  # noqa: E741, N803
    BLOCK: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    tiles: tl.constexpr = tl.cdiv(I, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = _activated(gate_up + row * gate_up_stride, I, column, GELU)
    tl.store(out + row * out_stride + column, value, mask=column < I)


@triton.jit(do_not_specialize_on_alignment=["scales"])  # type: ignore[untyped-decorator]
def _act_and_mul_e4m3(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    scales,
    gate_up_stride,
    out_stride,
    I: tl.constexpr,  # noqa: E741, N803
    BLOCK: tl.constexpr,  # noqa: N803
    GELU: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    gate = gate_up + row * gate_up_stride
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, I, BLOCK):
        value = _activated(gate, I, start + tl.arange(0, BLOCK), GELU).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale, inverse = e4m3_scale(tl.max(largest))
    tl.store(scales + row, scale)
    for start in tl.static_range(0, I, BLOCK):
        column = start + tl.arange(0, BLOCK)
        if I > BLOCK:  # else the row is still there
            value = _activated(gate, I, column, GELU).to(tl.float32)
        tl.store(out + row * out_stride + column, (value * inverse).to(tl.float8e4nv), mask=column < I)


@triton.jit  # type: ignore[untyped-decorator]
def _relu(x, count, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + place, mask=place < count)
    tl.store(x + place, tl.where(value < 0, 0.0, value), mask=place < count)
