"""The small element-wise steps of a decoder layer: norms, rotary embedding, activations. Torch
reference.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["act_and_mul", "apply_rope", "embed", "layer_norm", "quantize_e4m3", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, plus_one: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., dim]; weight [dim] or [heads, dim], or None for ones. plus_one: Gemma's form, x * scale
    * (1 + weight) in fp32 and rounded once, where Llama's rounds before the product too.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019. Computed in fp32, as
    the checkpoints were trained.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if plus_one and weight is not None:
        return (wide * scale * (1 + weight.float())).to(x.dtype)
    normed = (wide * scale).to(x.dtype)
    return normed if weight is None else normed * weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in fp32 and
    rounded once.
    """
    return functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(
        x.dtype
    )


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + dim/2) of the first `dim` elements of every head by its token's angle;
    the rest stays.

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dim/2].

    Source: Su et al., "RoFormer", 2021, in the half-split form that Llama checkpoints use.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def act_and_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up for a fused [rows, 2 * dim] projection -> [rows, dim]; act is silu or
    gelu_tanh (Gemma's).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if act == "silu":
        return functional.silu(gate) * up
    if act != "gelu_tanh":
        raise ValueError(f"activation {act!r}, must be 'silu' or 'gelu_tanh'")
    # Not functional.gelu, which gives the elements at the end of a thread's share other bits (MKL's
    # tanh does not).
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    bend = (0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)).tanh_()
    return (0.5 * wide * (1 + bend)).to(gate.dtype) * up


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] as float8_e4m3fn, and its scales fp32 [..., 1]: largest magnitude of the vector
    / 448, 1 for zeros.

    Below 1e-30 a vector counts as zeros: its scale would leave the range in which fp32 has full
    precision.
    """
    amax = x.float().abs().amax(-1, keepdim=True)
    # As a tensor: torch multiplies by the inverse of a scalar, which is another number in the last
    # place.
    top = torch.full_like(amax, 448.0)
    amax = torch.where(amax < 1e-30, top, amax)
    return (x.float() * (top / amax)).to(torch.float8_e4m3fn), amax / top


def embed(
    token_ids: torch.Tensor,
    sampled: torch.Tensor,
    source: torch.Tensor,
    table: torch.Tensor,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Rows of `table` [V, H] -> [T, H], of ids sampled[source] where source >= 0, else token_ids.

    `scale` is rounded to the table's dtype first.
    """
    ids = torch.where(source >= 0, sampled[source.clamp(min=0).long()], token_ids.long())
    return table[ids] * torch.tensor(scale, dtype=table.dtype, device=table.device)
