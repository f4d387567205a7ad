"""A decoder's linear layers on a GPU: our skinny kernels for few rows, cuBLAS for many."""

from __future__ import annotations

import torch

from kvrelay.kernels.decoder_layer import Norm
from kvrelay.kernels.fused_elementwise import act_and_mul, rms_norm
from kvrelay.kernels.invariant_gemm import invariant_linear
from kvrelay.kernels.skinny_gemm import MAX_ROWS, RING_ROWS, Activation, fits_ring, skinny_linear

__all__ = ["GpuLinear", "skinny_rows"]


def skinny_rows(weight: torch.Tensor) -> int:
    """Return up to how many rows our skinny kernels are faster than cuBLAS, for a weight.

    H200, us, ours with dependent launch against cuBLAS. Ring kernel at 32 rows: qkv 15.0 : 16.1, o
    10.7 : 12.9, gate-up with activation 55.2 : 58.9 without, down 30.0 : 32.6; at 64: 16.6 : 16.1,
    11.2 : 11.6, 56.6 : 60.1, 31.7 : 36.1. Others: o 11.4 : 13.1 at 32, 13.4 : 12.0 at 64; qkv 15.9
    : 15.5 at 8; gate-up with activation 64.6 : 72.0 at 128.
    """
    if fits_ring(weight):
        return RING_ROWS
    if len(weight) > 1 << 16:
        return 64
    return 32 if len(weight) <= 4096 else 1


class GpuLinear:
    """A weight [out_features, in_features] and an optional bias [out_features] on a GPU.

    Methods take x [rows, in_features] (rows may be strided). `out`: where to write.
    batch_invariant: a row's bits never depend on the number of rows.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.device = weight.device
        self.weight = weight.contiguous()
        self.bias = bias
        self._batch_invariant = batch_invariant
        fits = weight.dtype in (torch.bfloat16, torch.float16) and self.in_features % 8 == 0
        served = fits and not batch_invariant
        self._skinny_rows = skinny_rows(self.weight) if served else 0
        self._gated_rows = MAX_ROWS if served else 0

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x W^T + bias + residual, [rows, out_features]; `out` may be the residual."""
        if self._batch_invariant:
            return invariant_linear(x, self.weight, bias=self.bias, residual=residual, out=out)
        if 0 < len(x) <= self._skinny_rows:
            return skinny_linear(x, self.weight, bias=self.bias, residual=residual, out=out)
        return self._cublas(x, residual, out)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the product of the normed x."""
        return self(rms_norm(x, *norm))

    def gated(self, x: torch.Tensor, act: Activation, norm: Norm) -> torch.Tensor:
        """Return act(gate) * up of the normed x, [rows, out_features / 2]; gate's rows first."""
        x = rms_norm(x, *norm)
        if 0 < len(x) <= self._gated_rows:
            return skinny_linear(x, self.weight, bias=self.bias, gate=act)
        return act_and_mul(self(x), act)

    def _cublas(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        transposed = self.weight.T
        if out is None:
            out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        if residual is None:
            if self.bias is None:
                return torch.mm(x, transposed, out=out)
            return torch.addmm(self.bias, x, transposed, out=out)
        torch.addmm(residual, x, transposed, out=out)
        return out if self.bias is None else out.add_(self.bias)
