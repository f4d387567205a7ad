"""Activations between the linear layers of an MLP: silu(gate) * up, gelu(gate) * up, relu. Triton.

Grid: one program per row and tile of BLOCK columns; of relu, per BLOCK elements.
Arithmetic is fp32 and rounded once. Torch twins: `kernels/norm_rope_act.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.fused_norm import pdl_works
from kvrelay.kernels.launch_sizes import cdiv

__all__ = ["act_and_mul", "relu"]

Tile = tuple[int, int]
"""(columns per program, warps)."""


def act_and_mul(
    gate_up: torch.Tensor,
    act: str,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """act(gate) * up for a fused projection gate_up [T, 2 * I], gate first -> [T, I].

    act: "silu", or "gelu_tanh" (the tanh approximation, Gemma's). Rows of gate_up and out may be
    strided. tile: None takes the tuned one.
    """
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    if act not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {act!r}, must be 'silu' or 'gelu_tanh'")
    if gate_up.shape[1] % 2 or out.shape != (tokens, inner):
        raise ValueError(f"gate_up {tuple(gate_up.shape)} and out {tuple(out.shape)} do not fit")
    if gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row must be contiguous")
    if tokens:
        block, warps = tile or _tile(tokens, inner)
        pdl = pdl and pdl_works(gate_up.device)
        _act_and_mul[(tokens * cdiv(inner, block),)](
            gate_up, out, gate_up.stride(0), out.stride(0),
            I=inner, BLOCK=block, GELU=act == "gelu_tanh", PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


def relu(x: torch.Tensor, *, pdl: bool = False, tile: Tile | None = None) -> torch.Tensor:
    """max(x, 0) in place; x of any shape, contiguous. NaN stays NaN."""
    if not x.is_contiguous():
        raise ValueError("relu works in place on contiguous tensors")
    if x.numel():
        block, warps = tile or (1024, 4)
        pdl = pdl and pdl_works(x.device)
        _relu[(cdiv(x.numel(), block),)](
            x, x.numel(), BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl
        )  # fmt: skip
    return x


def _tile(tokens: int, inner: int) -> Tile:
    """Few tokens are spread over all SMs; many are served with fewer, longer programs."""
    return (512, 2) if tokens * inner <= 1 << 20 else (2048, 4)


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
    gate = gate_up + row * gate_up_stride
    inside = column < I
    g = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate + I + column, mask=inside, other=0.0).to(tl.float32)
    # 0.5 * g * (1 + tanh(z)) is g * sigmoid(2 * z).
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if GELU else g
    value = g / (1.0 + tl.exp(-z)) * up
    tl.store(out + row * out_stride + column, value.to(gate_up.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _relu(x, count, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + place, mask=place < count)
    tl.store(x + place, tl.where(value < 0, 0.0, value), mask=place < count)
