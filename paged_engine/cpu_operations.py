"""The decoder's operations in torch, for the CPU. Also the twin that the GPU's kernels are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.kv_write import write_kv
from kernels.linear import Linear
from kernels.norm_rope_act import apply_rope, rms_norm, silu_and_mul
from kernels.paged_attention import AttentionPlan, attend
from paged_engine.model_config import ModelConfig
from paged_engine.operations import LayerCache, Norm, QkNorm

__all__ = ["CpuOperations", "CpuStep"]

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the step's tokens, [T, 1, rotary_dim / 2], in the compute dtype."""


@dataclass(frozen=True, slots=True)
class CpuStep:
    """One step's tokens as tensors; T tokens of all scheduled requests, one after the other."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position in its own sequence
    blocks: torch.Tensor  # [T] int64, block that takes the token's KV
    offsets: torch.Tensor  # [T] int64, place in that block
    sampled_rows: torch.Tensor  # [S] int64, rows whose logits are wanted
    attention: Mapping[int, AttentionPlan]  # by window


class CpuOperations:
    """See paged_engine/operations.py for what each of them means."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._dtype = dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(weight, bias)

    def folds(self, dtype: torch.dtype) -> bool:
        # One operation less a step. Not in 16 bits, where the rounding of W * g would show.
        return dtype == torch.float32

    def embed(self, step: CpuStep, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding(step.token_ids, table)

    def rotary(self, step: CpuStep, cos_sin: torch.Tensor) -> Rotary:
        cos, sin = cos_sin[step.positions].to(self._dtype)[:, None].chunk(2, dim=-1)
        return cos, sin

    def normed_linear(self, hidden: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        return linear(rms_norm(hidden, norm.weight, norm.eps))

    def rotate_and_write(
        self, step: CpuStep, qkv: torch.Tensor, rotary: Rotary, qk_norm: QkNorm | None, cache: LayerCache
    ) -> torch.Tensor:
        rotated = self._heads + self._kv_heads
        heads = qkv.view(len(qkv), rotated + self._kv_heads, self._head_dim)
        qk = heads[:, :rotated]
        if qk_norm is not None:
            weight = torch.cat((qk_norm.query.expand(self._heads, -1), qk_norm.key.expand(self._kv_heads, -1)))
            qk = rms_norm(qk, weight, qk_norm.eps)
        qk = apply_rope(qk, *rotary)
        write_kv(*cache, qk[:, self._heads :], heads[:, rotated:], step.blocks, step.offsets)
        return qk[:, : self._heads]

    def attend(self, step: CpuStep, query: torch.Tensor, cache: LayerCache, window: int) -> torch.Tensor:
        return attend(query, *cache, step.attention[window]).view(len(query), -1)

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return hidden + linear(x)

    def gated_linear(self, hidden: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        return silu_and_mul(linear(rms_norm(hidden, norm.weight, norm.eps)))

    def final_norm(self, step: CpuStep, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(hidden[step.sampled_rows], norm.weight, norm.eps)

    def logits(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return linear(x).float()
