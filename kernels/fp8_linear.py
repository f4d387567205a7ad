"""Linear layers with fp8 (e4m3) weights on a GPU: half the bytes in a decode step, twice the arithmetic in a prefill.

Few rows: the skinny kernel reads fp8 weights, widens them in registers and multiplies with x as it is (weights only are
quantized). More: x is quantized too, each row with its own scale, and `torch._scaled_mm` multiplies fp8 by fp8 with a
scale per row and per output channel (compute capability 8.9 and later). The format: `kernels/fp8_reference.py`.

Grid of `quantize_rows`: one program per row, which stays in registers.
"""

# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fp8_reference import quantize_weight
from kernels.fused_act import act_and_mul
from kernels.fused_norm import e4m3_scale, pdl_works, rms_norm
from kernels.gpu_linear import FUSED_NORM_ROWS
from kernels.skinny_gemm import Activation, skinny_linear

__all__ = ["SKINNY_ROWS", "Fp8Linear", "quantize_rows", "quantize_weight"]

SKINNY_ROWS = 64
"""Up to so many rows the skinny kernel; above, quantized rows and `torch._scaled_mm`. To be measured."""


class Fp8Linear:
    """A float8_e4m3fn weight [out_features, in_features] with its scales, an optional bias. Methods as `GpuLinear`'s.

    scale: fp32, one per output channel ([out_features, 1] or [out_features]) or one number for all.
    fast_accumulation: `torch._scaled_mm` then adds with the tensor core's 14 bits instead of in fp32 registers.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        fast_accumulation: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        if weight.dtype != torch.float8_e4m3fn:
            raise ValueError(f"the weight must be float8_e4m3fn, is {weight.dtype}")
        if self.out_features % 16 or self.in_features % 16:
            raise ValueError(f"the sizes of an fp8 weight must be multiples of 16, not {tuple(weight.shape)}")
        if scale.numel() not in (1, self.out_features):
            raise ValueError(f"{scale.numel()} scales for {self.out_features} output channels")
        self.device = weight.device
        self.weight = weight.contiguous()
        self.scale = scale.float().reshape(-1).expand(self.out_features).contiguous()
        self.bias = bias
        self._fast_accumulation = fast_accumulation

    @classmethod
    def quantized(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Fp8Linear:
        """From a bf16, fp16 or fp32 weight."""
        return cls(*quantize_weight(weight), bias)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """x W^T + bias + residual -> [rows, out_features]; `out` may be the residual."""
        if 0 < len(x) <= SKINNY_ROWS:
            return self._skinny(x, residual=residual, out=out, pdl=pdl)
        return self._scaled(*quantize_rows(x, pdl=pdl), x.dtype, residual, out)

    def normed(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        plus_one: bool = False,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """The product of RMSNorm(x); norm_weight [in_features], `plus_one` as in `rms_norm`."""
        if 0 < len(x) <= FUSED_NORM_ROWS:
            norm = {"norm_weight": norm_weight, "eps": eps, "plus_one": plus_one}
            return self._skinny(x, residual=residual, out=out, pdl=pdl, **norm)
        if len(x) <= SKINNY_ROWS:
            return self(rms_norm(x, norm_weight, eps, plus_one=plus_one, pdl=pdl), residual=residual, out=out, pdl=pdl)
        scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        rows = rms_norm(x, norm_weight, eps, plus_one=plus_one, scales_out=scales, pdl=pdl)
        return self._scaled(rows, scales, x.dtype, residual, out)

    def gated(
        self,
        x: torch.Tensor,
        act: Activation,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        plus_one: bool = False,
        out: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """act(gate) * up, a weight's first half being the gate's -> [rows, out_features / 2]; RMSNorm of x before."""
        if 0 < len(x) <= SKINNY_ROWS:
            if norm_weight is not None and len(x) > FUSED_NORM_ROWS:
                x, norm_weight = rms_norm(x, norm_weight, eps, plus_one=plus_one, pdl=pdl), None
            norm = {"norm_weight": norm_weight, "eps": eps, "plus_one": plus_one}
            return self._skinny(x, gate=act, out=out, pdl=pdl, **norm)
        if norm_weight is None:
            gate_up = self(x, pdl=pdl)
        else:
            gate_up = self.normed(x, norm_weight, eps, plus_one=plus_one, pdl=pdl)
        return act_and_mul(gate_up, act, out=out, pdl=pdl)

    def _skinny(self, x: torch.Tensor, **around: object) -> torch.Tensor:
        return skinny_linear(x, self.weight, weight_scale=self.scale, bias=self.bias, **around)  # type: ignore[arg-type]

    def _scaled(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """float8_e4m3fn rows [M, K] and their scales [M, 1] -> [M, N] of `dtype` (by way of bf16, the only choice)."""
        y = torch._scaled_mm(
            rows,
            self.weight.T,
            scale_a=scales,
            scale_b=self.scale[None, :],
            bias=None if self.bias is None else self.bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=self._fast_accumulation,
        )
        if residual is not None:
            return torch.add(y, residual, out=out) if out is not None else (y + residual).to(dtype)
        if out is not None:
            return out.copy_(y)
        return y.to(dtype)


def quantize_rows(
    x: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] (rows may be strided) -> (float8_e4m3fn [M, K], fp32 scales [M, 1]); twin: `quantize_rows_reference`."""
    m, k = x.shape
    if out is None:
        out = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    pdl = pdl and pdl_works(x.device)
    if m:
        block = triton.next_power_of_2(k)
        _quantize_rows[(m,)](
            x,
            out,
            scales,
            x.stride(0),
            K=k,
            BLOCK=block,
            PDL=pdl,
            num_warps=min(max(block // 1024, 1), 16),
            launch_pdl=pdl,
        )
    return out, scales


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_rows(x, out, scales, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale, inverse = e4m3_scale(tl.max(tl.abs(values)))
    tl.store(scales + row, scale)
    tl.store(out + row * K + k, (values * inverse).to(tl.float8e4nv), mask=k < K)
