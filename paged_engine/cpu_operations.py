"""The decoder's operations in torch, for the CPU; twins of the GPU's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvrelay.kernels.decoder_layer import (
    Experts,
    Linear,
    PackedLora,
    act_and_mul,
    apply_rope,
    fewest_invariant_rows,
    rms_norm,
    route,
    write_kv,
)
from kvrelay.kernels.paged_attention import AttentionPlan, attend
from kvrelay.paged_engine.adapters import Site
from kvrelay.paged_engine.decoder import LayerCache, QkNorm
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.sharding import vocab_shard
from kvrelay.wire.errors import ConfigError

__all__ = ["CpuOperations", "CpuStep", "fewest_rows"]

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the step's tokens, [T, 1, rotary_dim / 2]."""


@dataclass(frozen=True, slots=True)
class CpuStep:
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, in its own sequence
    blocks: torch.Tensor  # [T] int64, takes the token's KV
    offsets: torch.Tensor  # [T] int64, in that block
    sampled_rows: torch.Tensor  # [S] int64, rows whose logits are wanted
    attention: Mapping[int, AttentionPlan]  # by window
    adapted: Sequence[tuple[int, torch.Tensor]] = ()  # adapter slots and their rows of the T
    adapted_samples: Sequence[tuple[int, torch.Tensor]] = ()  # among the S


def fewest_rows(linears: Iterable[Linear], dtype: torch.dtype) -> int:
    """Return the fewest rows from which a row's bits do not depend on the others.

    Raises ConfigError where they always do.
    """
    try:
        return max(fewest_invariant_rows(linear, dtype) for linear in linears)
    except ValueError as why:
        raise ConfigError(f"{why}; use dtype float32") from why


class CpuOperations:
    """A CPU's operations for one model; GpuOperations has the same methods."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, ranks: Ranks, *, adapted: bool
    ) -> None:
        self.ranks, self._adapted = ranks, adapted
        self.adapted_rows: Sequence[tuple[int, torch.Tensor]] = ()
        """Adapter slots and their rows in the layer being computed."""
        self._fewest: dict[tuple[int, ...], int] = {}
        self._config, self._dtype = config, dtype
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype)

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Linear:
        """Prepare y = x W^T + b; weight [out, in]. `scale` fp32 [out] makes the weight fp8."""
        if scale is not None:
            weight = (weight.float() * scale[:, None]).to(self._dtype)
        linear = Linear(weight, bias)
        return AdaptedLinear(linear, self) if self._adapted else linear

    def fewest_rows(self, *shapes: tuple[int, ...]) -> int:
        generator = torch.Generator().manual_seed(0)
        for shape in shapes:
            if shape not in self._fewest:
                weight = torch.randn(shape, generator=generator).to(self._dtype)
                self._fewest[shape] = fewest_rows([Linear(weight)], self._dtype)
        return max(self._fewest[shape] for shape in shapes)

    def output_layer(self, weight: torch.Tensor) -> Linear:
        return Linear(weight[vocab_shard(len(weight), self.ranks.rank, self.ranks.size)], None)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """Prepare gate_up [experts, 2 * inner, hidden] and down [experts, hidden, inner]."""
        return Experts(gate_up, down, self.fewest_rows(gate_up.shape[1:], down.shape[1:]))

    def embed(self, step: CpuStep, table: torch.Tensor) -> torch.Tensor:
        self.adapted_rows = step.adapted
        return functional.embedding(step.token_ids, table) * self._embedding_scale

    def rotary(self, step: CpuStep, cos_sin: torch.Tensor) -> Rotary:
        """Prepare a table [max_positions, rotary_dim] of fp32 cosines, then sines."""
        cos, sin = cos_sin[step.positions].to(self._dtype)[:, None].chunk(2, dim=-1)
        return cos, sin

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps, plus_one=self._config.gemma_norms)

    def normed_linear(
        self, hidden: torch.Tensor, norm: torch.Tensor, linear: Linear
    ) -> torch.Tensor:
        return linear(self.norm(hidden, norm))

    def rotate_and_write(
        self,
        step: CpuStep,
        qkv: torch.Tensor,
        rotary: Rotary,
        qk_norm: QkNorm | None,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values; return queries.

        Queries are [T, heads, head_dim]. Pairs (i, i + rotary_dim / 2) are rotated.
        """
        num_heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        rotated = num_heads + kv_heads
        heads = qkv.view(len(qkv), rotated + kv_heads, self._config.head_dim)
        qk = heads[:, :rotated]
        if qk_norm is not None:
            of_query, of_key = qk_norm
            qk = self.norm(
                qk, torch.cat((of_query.expand(num_heads, -1), of_key.expand(kv_heads, -1)))
            )
        qk = apply_rope(qk, *rotary)
        keys, values = cache
        write_kv(keys, values, qk[:, num_heads:], heads[:, rotated:], step.blocks, step.offsets)
        return qk[:, :num_heads]

    def attend(
        self, step: CpuStep, query: torch.Tensor, cache: LayerCache, window: int
    ) -> torch.Tensor:
        """Return causal attention, [T, heads * head_dim], `window` tokens back or 0 for all."""
        scale, softcap = self._config.attention_scale, self._config.attention_softcap
        (keys, values), plan = cache, step.attention[window]
        mixed = attend(query, keys, values, plan, scale=scale, softcap=softcap)
        return mixed.view(len(query), -1)

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return hidden + self.ranks.all_reduce(linear(x))

    def add_normed_linear(
        self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear, norm: torch.Tensor
    ) -> torch.Tensor:
        return hidden + self.norm(self.ranks.all_reduce(linear(x)), norm)

    def gated_linear(
        self, hidden: torch.Tensor, norm: torch.Tensor, linear: Linear
    ) -> torch.Tensor:
        return act_and_mul(self.normed_linear(hidden, norm, linear), self._config.activation)

    def add_experts(
        self, hidden: torch.Tensor, norm: torch.Tensor, router: Linear, experts: Experts
    ) -> torch.Tensor:
        mixture = self._config.moe
        assert mixture is not None
        x = self.norm(hidden, norm)
        chosen, weights = route(router(x), mixture.per_token, mixture.renormalize)
        return hidden + self.ranks.all_reduce(experts(x, chosen, weights, self._config.activation))

    def sampled(self, step: CpuStep, x: torch.Tensor) -> torch.Tensor:
        self.adapted_rows = step.adapted_samples
        return x[step.sampled_rows]

    def logits(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        logits = self.ranks.gather_columns(linear(x), self._config.vocab_size).float()
        cap = self._config.logit_softcap
        return logits if cap is None else (logits / cap).tanh_() * cap


class AdaptedLinear(Linear):
    """A linear layer with its rows' adapters; AdapterStore fills the slots."""

    def __init__(self, base: Linear, operations: CpuOperations) -> None:
        self.out_features, self.in_features = base.out_features, base.in_features
        self.bias, self._base, self._operations = base.bias, base, operations
        self._slots: dict[int, PackedLora] = {}

    def make_room(self, site: Site, slots: int, rank: int, dtype: torch.dtype) -> None:
        """Prepare for adapters. Raise ConfigError where products are not batch-invariant."""
        self._widths = site.rows
        shapes = [(len(site.rows) * rank, site.in_features), *((rows, rank) for rows in site.rows)]
        self._min_rows = self._operations.fewest_rows(*shapes)

    def prepare(self, down: torch.Tensor, up: torch.Tensor) -> PackedLora:
        return PackedLora(down, up, self._widths, self._min_rows)

    def put(self, slot: int, prepared: PackedLora | None) -> None:
        self._slots.pop(slot, None)
        if prepared is not None:
            self._slots[slot] = prepared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._base(x)
        for slot, rows in self._operations.adapted_rows:
            if slot in self._slots:
                self._slots[slot].add(y, x, rows)
        return y
