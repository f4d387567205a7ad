"""Triton kernels in torch, put together from the steps of the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrelay.kernels.decoder_layer import (
    Experts,
    apply_rope,
    quantize_e4m3,
    rms_norm,
    route,
    write_kv,
)


def embed(
    token_ids: torch.Tensor,
    sampled: torch.Tensor,
    source: torch.Tensor,
    table: torch.Tensor,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return rows of `table` [V, H] for ids sampled[source] where source >= 0, else token_ids."""
    ids = torch.where(source >= 0, sampled[source.clamp(min=0).long()], token_ids.long())
    return table[ids] * torch.tensor(scale, dtype=table.dtype, device=table.device)


def rope_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    rotated = query
    if q_norm is not None:
        rotated = rms_norm(query, q_norm, eps, plus_one=plus_one)
        key = rms_norm(key, k_norm, eps, plus_one=plus_one)
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
    rotated = apply_rope(rotated.float(), cos, sin)
    key = apply_rope(key.float(), cos, sin).to(qkv.dtype)
    query.copy_(rotated)
    blocks, offsets = blocks.long(), offsets.long()
    if key_scales is None or value_scales is None:
        write_kv(key_cache, value_cache, key, value, blocks, offsets)
        return query
    for cache, scales, vectors in (
        (key_cache, key_scales, key),
        (value_cache, value_scales, value),
    ):
        stored, scale = quantize_e4m3(vectors)
        # As bytes: torch has no indexed copy of fp8 on all devices.
        cache.view(torch.uint8)[blocks, :, offsets] = stored.view(torch.uint8)
        scales[blocks, :, offsets] = scale.squeeze(-1)
    return query


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    adapters: torch.Tensor,
    widths: Sequence[int],
) -> torch.Tensor:
    """Add up[a] (down[a] x) to y [T, N] in place, a = adapters[t] of each row, -1 for none.

    x [T, K], down [adapters, projections * rank, K], up [adapters, N, rank], adapters [T] int;
    `widths`: y's columns of each projection. What A gives is rounded to up's dtype.
    """
    rank = up.shape[-1]
    for adapter in sorted(set(adapters.tolist()) - {-1}):
        rows = (adapters == adapter).nonzero()[:, 0]
        low = (x[rows].float() @ down[adapter].float().T).to(up.dtype).float()
        parts = zip(
            torch.split(low, rank, 1), torch.split(up[adapter].float(), list(widths)), strict=True
        )
        y[rows] = (y[rows].float() + torch.cat([part @ b.T for part, b in parts], 1)).to(y.dtype)
    return y


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool,
    act: str = "silu",
) -> torch.Tensor:
    """Return the sum over experts e of weight_e * down_e(act(gate_e(x)) * up_e(x)), [T, H].

    x [T, H], router_logits [T, E], gate_up [E, 2 * I, H] (gate's rows first), down [E, H, I]; `act`
    is silu or gelu_tanh. Source: Jiang et al., "Mixtral of experts", 2024.
    """
    return Experts(gate_up, down)(x, *route(router_logits, top_k, renormalize), act)
