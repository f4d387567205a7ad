"""Small steps of a decoder layer in torch: the CPU path, and what twins of kernels consist of."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = [
    "act_and_mul",
    "apply_rope",
    "dequantize",
    "quantize_e4m3",
    "rms_norm",
    "write_kv",
]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32.

    x [..., dim]; weight [dim]. plus_one: Gemma's x * scale * (1 + weight), rounded once. Source:
    Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if plus_one:
        return (wide * scale * (1 + weight.float())).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + dim/2) of each head's first `dim` elements by the token's angle.

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dim/2]. Source: Su et al., "RoFormer",
    2021, in the half-split form.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def act_and_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """Return act(gate) * up of a fused [rows, 2 * dim] projection; act is silu or gelu_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    if act == "silu":
        return functional.silu(gate) * up
    if act != "gelu_tanh":
        raise ValueError(f"activation {act!r}, must be 'silu' or 'gelu_tanh'")
    # functional.gelu gives a thread's last elements other bits.
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    bend = (0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)).tanh_()
    return (0.5 * wide * (1 + bend)).to(gate.dtype) * up


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors x [..., dim] as float8_e4m3fn, and their fp32 scales [..., 1].

    A scale is the vector's largest magnitude / 448, or 1 below 1e-30.
    """
    amax = x.float().abs().amax(-1, keepdim=True)
    # torch multiplies by the inverse of a scalar, with another last bit.
    top = torch.full_like(amax, 448.0)
    amax = torch.where(amax < 1e-30, top, amax)
    return (x.float() * (top / amax)).to(torch.float8_e4m3fn), amax / top


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float8_e4m3fn [N, K] times scale ([N, 1], [N] or one number), rounded to `dtype`."""
    return (weight.float() * scale.float().reshape(-1, 1)).to(dtype)


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write key and value [tokens, kv_heads, head_dim] to their offsets of their blocks.

    Caches [num_blocks, kv_heads, block_size, head_dim]; blocks and offsets int64 [tokens].
    """
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value
