"""RMSNorm and LayerNorm of rows; RMSNorm with the residual's addition before and fp8 after it in
one launch. Triton.

Grid: one program per row; the whole row (H <= 16384) stays in registers between its one load and
its one store. Sums are fp32. The number of warps follows from H alone, so a row's terms are added
in one order in every batch. Rounding is where transformers' models round: see `rms_norm`. Torch
twins: `kernels/norm_rope_act.py`.

Also what all element-wise kernels share: the scale of a vector in fp8, and whether dependent launch
is possible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.launch_sizes import power_of_2

__all__ = ["e4m3_scale", "layer_norm", "pdl_works", "rms_norm", "warps_for"]

MAX_H = 16384


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    plus_one: bool = False,
    scales_out: torch.Tensor | None = None,
    pdl: bool = False,
    num_warps: int | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension -> [T, H].

    x [T, H] (rows may be strided), weight [H] or None for ones. residual [T, H]: `residual += x`
    first, in place and rounded to its dtype; the norm is taken of the sum. plus_one: Gemma's form,
    x * rstd * (1 + weight) in fp32, rounded once. Else Llama's: x * rstd is rounded, multiplied by
    the weight and rounded again. scales_out [T, 1] fp32: makes the result float8_e4m3fn. The
    rounded row is divided by its largest magnitude / 448, which is written here. num_warps:
    None takes the tuned number.
    """
    return _norm(x, weight, None, eps, residual, scales_out, pdl, num_warps, plus_one=plus_one)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *, pdl: bool = False
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in fp32 and
    rounded once -> [T, H].
    """
    return _norm(x, weight, bias, eps, None, None, pdl, None, centered=True)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    scales_out: torch.Tensor | None,
    pdl: bool,
    num_warps: int | None,
    *,
    plus_one: bool = False,
    centered: bool = False,
) -> torch.Tensor:
    tokens, hidden = x.shape
    if hidden > MAX_H:
        raise ValueError(f"rows of {hidden} elements, at most {MAX_H} fit one program")
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the elements of a row must be contiguous")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} does not fit x {tuple(x.shape)}")
    if scales_out is not None and (scales_out.numel() != tokens or not scales_out.is_contiguous()):
        raise ValueError(
            f"scales_out must be a contiguous [{tokens}, 1], is {tuple(scales_out.shape)}"
        )
    out = torch.empty(
        tokens,
        hidden,
        dtype=x.dtype if scales_out is None else torch.float8_e4m3fn,
        device=x.device,
    )
    if tokens:
        block = power_of_2(hidden)
        pdl = pdl and pdl_works(x.device)
        _norm_rows[(tokens,)](
            x, residual, weight, bias, out, scales_out,
            eps, x.stride(0), 0 if residual is None else residual.stride(0),
            H=hidden, BLOCK=block, CENTERED=centered, PLUS_ONE=plus_one and weight is not None, PDL=pdl,
            num_warps=num_warps or warps_for(block), launch_pdl=pdl,
        )  # fmt: skip
    return out


def warps_for(block: int) -> int:
    """Warps of a program that holds a row of `block` elements: 16 elements a thread, two loads of
    16 bytes.
    """
    return min(max(block // 512, 1), 16)


def pdl_works(device: torch.device) -> bool:
    """Whether kernels on `device` can start before their predecessor has ended: from compute
    capability 9.0 on.
    """
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def e4m3_scale(amax):  # type: ignore[no-untyped-def]
    """Scale of vectors whose largest magnitudes are `amax` fp32, and its inverse; (1, 1) for
    vectors of zeros.

    Below 1e-30 a vector counts as zeros: its scale would leave the range in which fp32 has full
    precision.
    """
    zero = amax < 1e-30
    amax = tl.where(zero, 448.0, amax)
    return tl.div_rn(amax, 448.0), tl.div_rn(448.0, amax)


@triton.jit(do_not_specialize_on_alignment=["scales"])  # type: ignore[untyped-decorator]
def _norm_rows(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    bias,
    out,
    scales,
    eps,
    x_stride,
    residual_stride,
    H: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CENTERED: tl.constexpr,  # noqa: N803
    PLUS_ONE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < H
    if PDL:
        # The next kernel reads nothing of ours before its own wait, so it may come as soon as there
        # is room.
        tl.extra.cuda.gdc_launch_dependents()
    if weight is not None:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    row = tl.program_id(0).to(tl.int64)
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        stream = residual + row * residual_stride + column
        total = (wide + tl.load(stream, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(stream, total, mask=inside)
        wide = total.to(tl.float32)

    if CENTERED:
        wide = tl.where(inside, wide - tl.sum(wide) / H, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / H + eps)
    if CENTERED:
        normed = normed * gain + shift
    elif PLUS_ONE:
        normed = normed * (1.0 + gain)
    elif weight is not None:
        normed = normed.to(dtype).to(tl.float32) * gain
    normed = normed.to(dtype)

    if scales is not None:
        wide = normed.to(tl.float32)
        scale, inverse = e4m3_scale(tl.max(tl.abs(wide)))
        tl.store(scales + row, scale)
        normed = (wide * inverse).to(tl.float8e4nv)
    tl.store(out + row * H + column, normed, mask=inside)
