"""Linear layers with fp8 (e4m3) weights on a GPU.

One row: the skinny kernel widens the weights in registers. More rows are quantized, each with its
own scale: fp8 meets fp8, in the skinny kernel for few rows and in `torch._scaled_mm` for many
(compute capability 8.9).

Grid of `quantize_rows`: one program per row, which stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.decoder_layer import Norm, quantize_e4m3
from kvrelay.kernels.fused_elementwise import act_and_mul, e4m3_scale, rms_norm, warps_for
from kvrelay.kernels.launch import dependent, wait_for_previous
from kvrelay.kernels.skinny_gemm import Activation, skinny_linear

__all__ = ["SKINNY_ROWS", "Fp8Linear", "quantize_rows"]

# More rows go to `torch._scaled_mm`.
SKINNY_ROWS = 64

# One row as it is; or float8_e4m3fn [M, K] and fp32 scales [M, 1].
Rows = tuple[torch.Tensor, torch.Tensor | None]


class Fp8Linear:
    """A float8_e4m3fn weight [out_features, in_features] with scales and an optional bias.

    scale: one per output channel. Methods as `GpuLinear`'s.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        if self.out_features % 16 or self.in_features % 16:
            raise ValueError(
                f"the sizes of an fp8 weight must be multiples of 16, not {tuple(weight.shape)}"
            )
        self.device = weight.device
        self.weight = weight.contiguous()
        self.scale = scale.float().reshape(-1)
        self.bias = bias

    @classmethod
    def quantized(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Fp8Linear:
        return cls(*quantize_e4m3(weight), bias)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = (x, None) if len(x) == 1 else quantize_rows(x)
        return self._product(rows, x.dtype, residual=residual, out=out)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        rows = _normed_rows(x, norm)
        return self._product(rows, x.dtype)

    def gated(self, x: torch.Tensor, act: Activation, norm: Norm) -> torch.Tensor:
        rows = _normed_rows(x, norm)
        if 0 < len(x) <= SKINNY_ROWS:
            return self._product(rows, x.dtype, gate=act)
        return act_and_mul(self._product(rows, x.dtype), act)

    def _product(
        self,
        rows: Rows,
        dtype: torch.dtype,
        *,
        residual: torch.Tensor | None = None,
        gate: Activation | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x, x_scale = rows
        if not 0 < len(x) <= SKINNY_ROWS:
            assert x_scale is not None
            return self._many_rows(x, x_scale, dtype, residual, out)
        if out is None:
            out = torch.empty(
                len(x),
                self.out_features // (1 if gate is None else 2),
                dtype=dtype,
                device=x.device,
            )
        return skinny_linear(
            x,
            self.weight,
            x_scale=x_scale,
            weight_scale=self.scale,
            bias=self.bias,
            residual=residual,
            gate=gate,
            out=out,
        )

    def _many_rows(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        dtype: torch.dtype,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        y = torch._scaled_mm(
            x,
            self.weight.T,
            scale_a=x_scale,
            scale_b=self.scale[None, :],
            bias=None if self.bias is None else self.bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,  # the only one with a scale per row and channel
            # Hopper's own additions are 2 to 10 % faster, but errors up to 2 % at K = 4096
            # (DeepSeek-V3, 2024, 3.3.2).
            use_fast_accum=False,
        )
        if residual is not None:
            return torch.add(y, residual, out=out) if out is not None else (y + residual).to(dtype)
        if out is not None:
            return out.copy_(y)
        return y.to(dtype)


def _normed_rows(x: torch.Tensor, norm: Norm) -> Rows:
    scales = None if len(x) == 1 else torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    return rms_norm(x, *norm, scales_out=scales), scales


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [M, K] to float8_e4m3fn and fp32 scales [M, 1]; twin: `quantize_e4m3`.

    Rows of x may be strided.
    """
    m, k = x.shape
    out = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    if m:
        block = triton.next_power_of_2(k)
        _quantize_rows[(m,)](
            x,
            out,
            scales,
            x.stride(0),
            K=k,
            BLOCK=block,
            num_warps=warps_for(block),
            **dependent(x.device),
        )
    return out, scales


@triton.jit
def _quantize_rows(
    x, out, scales, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    values = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale, inverse = e4m3_scale(tl.max(tl.abs(values)))
    tl.store(scales + row, scale)
    tl.store(out + row * K + k, (values * inverse).to(tl.float8e4nv), mask=k < K)
