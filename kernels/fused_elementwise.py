"""Norms, activations and embedding in Triton; torch twins in `kernels/decoder_layer.py`.

Grids: norms one program per row; activations and embedding one per row and tile of
columns. Arithmetic is fp32. A norm's warps follow from H alone, so a row is summed in one order in
every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.launch import cdiv, dependent, power_of_2, wait_for_previous

__all__ = [
    "act_and_mul",
    "activate",
    "e4m3_scale",
    "embed",
    "rms_norm",
    "warps_for",
]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool = False,
    *,
    scales_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, [T, H].

    x [T, H] (rows may be strided), weight [H]. plus_one: Gemma's x * rstd * (1 +
    weight), rounded once; else Llama's, rounded before and after the weight. scales_out [T, 1]
    fp32: the result is float8_e4m3fn, with its row's largest magnitude / 448 written here.
    """
    tokens, hidden = x.shape
    dtype = x.dtype if scales_out is None else torch.float8_e4m3fn
    out = torch.empty(tokens, hidden, dtype=dtype, device=x.device)
    if tokens:
        block = power_of_2(hidden)
        _norm_rows[(tokens,)](
            x,
            weight,
            out,
            scales_out,
            eps,
            x.stride(0),
            H=hidden,
            BLOCK=block,
            PLUS_ONE=plus_one,
            num_warps=warps_for(block),
            **dependent(x.device),
        )
    return out


def warps_for(block: int) -> int:
    """Return the warps for a row of `block` elements: 16 a thread, two loads of 16 bytes."""
    return min(max(block // 512, 1), 16)


def act_and_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """Return act(gate) * up of a fused projection gate_up [T, 2 * I], gate first, as [T, I].

    act: "silu" or "gelu_tanh". Rows may be strided.
    """
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        # Few tokens are spread over all SMs.
        block, warps = (512, 2) if tokens * inner <= 1 << 20 else (2048, 4)
        _act_and_mul[(tokens * cdiv(inner, block),)](
            gate_up,
            out,
            gate_up.stride(0),
            I=inner,
            BLOCK=block,
            ACT=act,
            num_warps=warps,
            **dependent(gate_up.device),
        )
    return out


def embed(
    token_ids: torch.Tensor,
    sampled: torch.Tensor,
    source: torch.Tensor,
    table: torch.Tensor,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return embedding rows of sampled[source] where source >= 0, else of token_ids, [T, H].

    token_ids and source int32 | int64 [T], sampled int64 [max_slots], table [V, H], rows may be
    strided. scale: Gemma's, rounded to the table's dtype first.
    """
    tokens, hidden = token_ids.shape[0], table.shape[1]
    out = torch.empty(tokens, hidden, dtype=table.dtype, device=table.device)
    if tokens:
        block = min(power_of_2(hidden), 1024 if tokens <= 512 else 4096)
        _embed[(tokens * cdiv(hidden, block),)](
            token_ids,
            sampled,
            source,
            table,
            out,
            torch.tensor(scale, dtype=table.dtype).item(),
            table.stride(0),
            H=hidden,
            BLOCK=block,
            num_warps=max(block // 512, 1),
            **dependent(table.device),
        )
    return out


@triton.jit
def activate(gate, ACT: tl.constexpr):
    """Return silu(gate) or, with ACT "gelu_tanh", gelu: 0.5 g (1 + tanh(z / 2)) = g sigmoid(z)."""
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if ACT == "gelu_tanh" else gate
    return gate / (1.0 + tl.exp(-z))


@triton.jit
def e4m3_scale(amax):
    """Return fp8 scale and inverse for largest magnitudes `amax`, (1, 1) below 1e-30."""
    zero = amax < 1e-30
    amax = tl.where(zero, 448.0, amax)
    return tl.div_rn(amax, 448.0), tl.div_rn(448.0, amax)


@triton.jit(do_not_specialize_on_alignment=["scales"])
def _norm_rows(
    x,
    weight,
    out,
    scales,
    eps,
    x_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < H
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    row = tl.program_id(0).to(tl.int64)
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / H + eps)
    normed = normed * (1.0 + gain) if PLUS_ONE else normed.to(dtype).to(tl.float32) * gain
    normed = normed.to(dtype)

    if scales is not None:
        wide = normed.to(tl.float32)
        scale, inverse = e4m3_scale(tl.max(tl.abs(wide)))
        tl.store(scales + row, scale)
        normed = (wide * inverse).to(tl.float8e4nv)
    tl.store(out + row * H + column, normed, mask=inside)


@triton.jit
def _act_and_mul(
    gate_up,
    out,
    gate_up_stride,
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = tl.cdiv(I, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    gate = gate_up + row * gate_up_stride
    inside = column < I
    g = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate + I + column, mask=inside, other=0.0).to(tl.float32)
    value = activate(g, ACT) * up
    tl.store(out + row * I + column, value.to(gate_up.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["token_ids", "sampled", "source"])
def _embed(
    token_ids,
    sampled,
    source,
    table,
    out,
    scale,
    table_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = tl.cdiv(H, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    wait_for_previous(PDL)
    slot = tl.load(source + row)
    token = tl.load(token_ids + row)
    token = tl.where(slot >= 0, tl.load(sampled + slot, mask=slot >= 0, other=0), token)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(table + token * table_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + column, (value * scale).to(out.dtype.element_ty), mask=inside)
