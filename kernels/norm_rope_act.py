"""The small element-wise steps of a decoder layer: RMSNorm, rotary embedding, SiLU-and-multiply. Torch reference."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["apply_rope", "rms_norm", "silu_and_mul"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., dim]; weight [dim] or [heads, dim], or None for ones.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019. Computed in fp32, as the checkpoints
    were trained.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = (wide * scale).to(x.dtype)
    return normed if weight is None else normed * weight


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + dim/2) of every head by its token's angle.

    x [tokens, heads, dim], cos and sin [tokens, 1, dim/2].

    Source: Su et al., "RoFormer", 2021, in the half-split form that Llama checkpoints use.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for a fused [rows, 2 * dim] projection -> [rows, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
