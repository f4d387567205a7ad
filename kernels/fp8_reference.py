"""fp8 (e4m3) weights in plain torch: how they are made, and what a product with them means. No
Triton.

A weight [N, K] is float8_e4m3fn and one fp32 scale per output channel [N, 1] (or one for all):
weight = fp8 * scale. The GPU's layers are in `kernels/fp8_linear.py`; the CPU computes with
`dequantize`d weights.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = [
    "E4M3_MAX",
    "dequantize",
    "fp8_linear_reference",
    "quantize_rows_reference",
    "quantize_weight",
]

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn."""


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (float8_e4m3fn [N, K], fp32 scales [N, 1]); a channel's largest magnitude
    becomes 448.
    """
    return quantize_rows_reference(weight)


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> (float8_e4m3fn [M, K], fp32 scales [M, 1]): x = fp8 * scale, scale = amax / 448,
    or 1 for zeros.
    """
    wide = x.float()
    amax = wide.abs().amax(dim=1, keepdim=True)
    amax = torch.where(amax < 1e-30, E4M3_MAX, amax)
    return (wide * (E4M3_MAX / amax)).to(torch.float8_e4m3fn), amax / E4M3_MAX


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float8_e4m3fn [N, K] times scale ([N, 1], [N] or one number), rounded to `dtype`."""
    return (weight.float() * scale.float().reshape(-1, 1)).to(dtype)


def fp8_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] (not quantized) times the dequantized weight in fp32, rounded once to x's type ->
    [M, N].
    """
    wide_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), dequantize(weight, scale, torch.float32), wide_bias).to(
        x.dtype
    )
