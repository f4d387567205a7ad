"""The decoder's operations in torch, for the CPU; twins of the GPU's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvrelay.kernels.elementwise import act_and_mul, apply_rope, layer_norm, rms_norm, write_kv
from kvrelay.kernels.linear import Linear, fewest_invariant_rows
from kvrelay.kernels.lora import PackedLora
from kvrelay.kernels.moe import Experts, route
from kvrelay.kernels.paged_attention import AttentionPlan, attend
from kvrelay.paged_engine.adapters import Site, adapter_sites, stack_sites
from kvrelay.paged_engine.decoder import LayerCache, Norm, QkNorm
from kvrelay.paged_engine.lora_files import Adapter
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.sharding import vocab_shard
from kvrelay.wire.errors import ConfigError

__all__ = ["CpuAdapterOperations", "CpuAdapters", "CpuOperations", "CpuStep", "fewest_rows"]

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
    """A CPU's operations for one model; GpuOperations has the same methods.

    Results may be written into `hidden`. A norm of None is no norm.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ranks: Ranks) -> None:
        self._ranks = ranks
        self._expert_rows: dict[tuple[torch.Size, torch.Size], int] = {}
        self._config, self._dtype = config, dtype
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype)
        self._scores: dict[str, Any] = {}
        if config.query_pre_attn_scalar is not None or config.attention_softcap is not None:
            self._scores = {"scale": config.attention_scale, "softcap": config.attention_softcap}

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Linear:
        """Prepare y = x W^T + b; weight [out, in]. `scale` fp32 [out] makes the weight fp8."""
        if scale is not None:
            weight = (weight.float() * scale[:, None]).to(self._dtype)
        return Linear(weight, bias)

    def output_layer(self, weight: torch.Tensor) -> Linear:
        return Linear(weight[vocab_shard(len(weight), self._ranks.rank, self._ranks.size)], None)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """Prepare gate_up [experts, 2 * inner, hidden] and down [experts, hidden, inner]."""
        shapes = (gate_up.shape[1:], down.shape[1:])
        if shapes not in self._expert_rows:
            self._expert_rows[shapes] = fewest_rows(
                [Linear(gate_up[0]), Linear(down[0])], self._dtype
            )
        return Experts(gate_up, down, self._expert_rows[shapes])

    def embed(self, step: CpuStep, table: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(step.token_ids, table)
        return rows if self._config.embedding_scale == 1 else rows * self._embedding_scale

    def add_positions(
        self, step: CpuStep, hidden: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        return hidden + functional.embedding(step.positions, table)

    def rotary(self, step: CpuStep, cos_sin: torch.Tensor) -> Rotary:
        """Prepare a table [max_positions, rotary_dim] of fp32 cosines, then sines."""
        cos, sin = cos_sin[step.positions].to(self._dtype)[:, None].chunk(2, dim=-1)
        return cos, sin

    def norm(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return hidden
        if norm.bias is not None:
            return layer_norm(hidden, norm.weight, norm.bias, norm.eps)
        return rms_norm(hidden, norm.weight, norm.eps, plus_one=norm.plus_one)

    def normed_linear(
        self, hidden: torch.Tensor, norm: Norm | None, linear: Linear
    ) -> torch.Tensor:
        return linear(self.norm(hidden, norm))

    def rotate_and_write(
        self,
        step: CpuStep,
        qkv: torch.Tensor,
        rotary: Rotary | None,
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
            weight = torch.cat(
                (qk_norm.query.expand(num_heads, -1), qk_norm.key.expand(kv_heads, -1))
            )
            qk = rms_norm(qk, weight, qk_norm.eps, plus_one=qk_norm.plus_one)
        if rotary is not None:
            qk = apply_rope(qk, *rotary)
        keys, values = cache
        write_kv(keys, values, qk[:, num_heads:], heads[:, rotated:], step.blocks, step.offsets)
        return qk[:, :num_heads]

    def attend(
        self, step: CpuStep, query: torch.Tensor, cache: LayerCache, window: int
    ) -> torch.Tensor:
        """Return causal attention, [T, heads * head_dim], `window` tokens back or 0 for all."""
        keys, values = cache
        return attend(query, keys, values, step.attention[window], **self._scores).view(
            len(query), -1
        )

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return hidden + self._ranks.all_reduce(linear(x))

    def add_normed_linear(
        self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear, norm: Norm
    ) -> torch.Tensor:
        return hidden + self.norm(self._ranks.all_reduce(linear(x)), norm)

    def gated_linear(self, hidden: torch.Tensor, norm: Norm | None, linear: Linear) -> torch.Tensor:
        return act_and_mul(self.normed_linear(hidden, norm, linear), self._config.activation)

    def relu_linear(self, hidden: torch.Tensor, norm: Norm | None, linear: Linear) -> torch.Tensor:
        return self.normed_linear(hidden, norm, linear).relu_()

    def add_experts(
        self, hidden: torch.Tensor, norm: Norm, router: Linear, experts: Experts
    ) -> torch.Tensor:
        mixture = self._config.moe
        assert mixture is not None
        x = self.norm(hidden, norm)
        chosen, weights = route(router(x), mixture.per_token, mixture.renormalize)
        return hidden + self._ranks.all_reduce(experts(x, chosen, weights, self._config.activation))

    def sampled(self, step: CpuStep, x: torch.Tensor) -> torch.Tensor:
        return x[step.sampled_rows]

    def barrier(self, x: torch.Tensor) -> None:
        """Let no rank get past this before all have come so far."""
        if self._ranks.size > 1:
            self._ranks.all_reduce(x.new_zeros(1))

    def logits(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        logits = self._ranks.gather_columns(linear(x), self._config.vocab_size).float()
        cap = self._config.logit_softcap
        return logits if cap is None else (logits / cap).tanh_() * cap


Prepared = list[dict[str, PackedLora]]


class AdaptedLinear(Linear):
    def __init__(self, base: Linear, operations: CpuAdapterOperations) -> None:
        self.out_features, self.in_features = base.out_features, base.in_features
        self.device = base.device
        self.bias, self._base, self._operations = base.bias, base, operations
        self.slots: dict[int, PackedLora] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._base(x)
        for slot, rows in self._operations.adapted_rows:
            if slot in self.slots:
                self.slots[slot].add(y, x, rows)
        return y


class CpuAdapterOperations(CpuOperations):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__(config, dtype, ranks)
        self.adapted_rows: Sequence[tuple[int, torch.Tensor]] = ()

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Linear:
        return AdaptedLinear(super().linear(weight, bias, scale), self)

    def embed(self, step: CpuStep, table: torch.Tensor) -> torch.Tensor:
        self.adapted_rows = step.adapted
        return super().embed(step, table)

    def sampled(self, step: CpuStep, x: torch.Tensor) -> torch.Tensor:
        self.adapted_rows = step.adapted_samples
        return super().sampled(step, x)


class CpuAdapters:
    """A CPU's adapters; `linears` are `Decoder.sites`."""

    def __init__(
        self,
        model: ModelConfig,
        linears: Sequence[Mapping[str, AdaptedLinear]],
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        """Raise ConfigError where products are not batch-invariant."""
        self._sites, self._linears = adapter_sites(model), linears
        self._rank, self._dtype = max_rank, dtype
        self._min_rows = fewest_rows(_one_of_each(self._sites, max_rank, dtype), dtype)

    def prepare(self, adapter: Adapter) -> Prepared:
        """Return this rank's matrices for `install`. May run in a thread beside the steps."""
        found = stack_sites(adapter, self._sites, self._rank, self._dtype)
        return [
            {
                name: PackedLora(*matrices, sites[name].rows, self._min_rows)
                for name, matrices in layer.items()
            }
            for sites, layer in zip(self._sites, found, strict=True)
        ]

    def install(self, slot: int, prepared: Prepared) -> None:
        """Put matrices into an unused slot, before the next step."""
        for linears, packed in zip(self._linears, prepared, strict=True):
            for name, lora in packed.items():
                linears[name].slots[slot] = lora

    def remove(self, slot: int) -> None:
        for linears in self._linears:
            for linear in linears.values():
                linear.slots.pop(slot, None)


def _one_of_each(
    layers: Iterable[Mapping[str, Site]], rank: int, dtype: torch.dtype
) -> list[Linear]:
    shapes: set[tuple[int, int]] = set()
    for site in (site for sites in layers for site in sites.values()):
        shapes |= {(len(site.rows) * rank, site.in_features), *((rows, rank) for rows in site.rows)}
    generator = torch.Generator().manual_seed(0)
    return [Linear(torch.randn(shape, generator=generator).to(dtype)) for shape in sorted(shapes)]
