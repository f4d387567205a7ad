"""The decoder's operations on an NVIDIA GPU: Triton kernels and cuBLAS, fit for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from kvrelay.kernels.decode_plan import DecodeWorkspace, plan_decode
from kvrelay.kernels.decoder_layer import Norm
from kvrelay.kernels.fp8_linear import Fp8Linear
from kvrelay.kernels.fused_elementwise import act_and_mul, embed, rms_norm
from kvrelay.kernels.fused_rope_write import rope_and_write
from kvrelay.kernels.gpu_linear import GpuLinear
from kvrelay.kernels.grouped_gemm import moe
from kvrelay.kernels.grouped_lora import INVARIANT_ROWS, default_tiles, expand, shrink
from kvrelay.kernels.launch import pdl_works
from kvrelay.kernels.paged_decode import paged_decode
from kvrelay.kernels.paged_prefill import paged_prefill
from kvrelay.kernels.skinny_gemm import Activation
from kvrelay.paged_engine.adapters import Site
from kvrelay.paged_engine.decoder import LayerCache, QkNorm
from kvrelay.paged_engine.lora_files import Matrices
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.sharding import vocab_shard

__all__ = ["AdaptedLinear", "GpuOperations", "GpuStep", "Linear"]

Linear = GpuLinear | Fp8Linear

_LEAST_QUANTIZED = 256


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step's T tokens and S sequences, of which up to the first D have one token; int32."""

    token_ids: torch.Tensor  # [T]
    source: torch.Tensor  # [T] slot whose newest sampled token it is, or -1
    positions: torch.Tensor  # [T]
    blocks: torch.Tensor  # [T] takes the token's KV; padding: the null block
    offsets: torch.Tensor  # [T] in that block
    context_lens: torch.Tensor  # [S] this step's included; 0: padding
    decode_context_lens: torch.Tensor  # [D] 0: not a decode
    tables: torch.Tensor  # [S, max_blocks]
    query_starts: torch.Tensor | None  # [S + 1] first row of each sequence, for the tiles
    tiles: torch.Tensor | None  # [tiles, 2] of the prefill chunks, if any
    sampled_rows: torch.Tensor | None  # [R]; None for all
    adapters: torch.Tensor | None = None  # [T] slots or -1; None where no row has one


class GpuOperations:
    """A GPU's CpuOperations; `sampled` int64 [slots] are the newest tokens."""

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        *,
        sampled: torch.Tensor,
        max_rows: int,
        kv_dtype: torch.dtype,
        batch_invariant: bool,
        quantize: bool,
        adapted: bool,
    ) -> None:
        self._config, self.ranks, self._adapted = config, ranks, adapted
        self.row_adapters: torch.Tensor | None = None
        """[rows] adapter slots in the layer being computed, if any."""
        self._sample_adapters: torch.Tensor | None = None
        self._sampled = sampled
        self.batch_invariant, self._quantize = batch_invariant, quantize
        self._max_sampled = max_rows
        self._workspaces = {
            window: DecodeWorkspace(
                max_batch=max_rows,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                device=sampled.device,
                element_bytes=kv_dtype.itemsize,
            )
            for window in config.windows
        }
        self._logits: torch.Tensor | None = None

    def plan(self, step: GpuStep, block_size: int) -> None:
        lengths = step.decode_context_lens
        if len(lengths):
            for window, workspace in self._workspaces.items():
                plan_decode(lengths, workspace, block_size=block_size, window=window)
        self.row_adapters = self._sample_adapters = step.adapters
        if step.adapters is not None and step.sampled_rows is not None:
            self._sample_adapters = step.adapters[step.sampled_rows]

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Linear:
        linear = self._plain_linear(weight, bias, scale)
        return cast("Linear", AdaptedLinear(linear, self)) if self._adapted else linear

    def _plain_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
    ) -> Linear:
        if scale is not None:
            return Fp8Linear(weight, scale, bias)
        # Not small ones, such as a router: they decide more than they cost.
        fits = min(weight.shape) >= _LEAST_QUANTIZED and not any(size % 16 for size in weight.shape)
        if self._quantize and fits:
            return Fp8Linear.quantized(weight, bias)
        return GpuLinear(weight, bias, batch_invariant=self.batch_invariant)

    def output_layer(self, weight: torch.Tensor) -> Linear:
        # Never quantized: it decides the tokens.
        rows = vocab_shard(len(weight), self.ranks.rank, self.ranks.size)
        return GpuLinear(weight[rows], batch_invariant=self.batch_invariant)

    def experts(
        self, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up, down

    def embed(self, step: GpuStep, table: torch.Tensor) -> torch.Tensor:
        scale = self._config.embedding_scale
        return embed(step.token_ids, self._sampled, step.source, table, scale=scale)

    def rotary(self, step: GpuStep, cos_sin: torch.Tensor) -> torch.Tensor:
        return cos_sin

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, *self._norm(weight))

    def _norm(self, weight: torch.Tensor) -> Norm:
        return Norm(weight, self._config.rms_norm_eps, self._config.gemma_norms)

    def normed_linear(
        self, hidden: torch.Tensor, norm: torch.Tensor, linear: Linear
    ) -> torch.Tensor:
        return linear.normed(hidden, self._norm(norm))

    def rotate_and_write(
        self,
        step: GpuStep,
        qkv: torch.Tensor,
        rotary: torch.Tensor,
        qk_norm: QkNorm | None,
        cache: LayerCache,
    ) -> torch.Tensor:
        config = self._config
        keys, values, *scales = cache
        key_scales, value_scales = scales or (None, None)
        of_query, of_key = qk_norm or (None, None)
        return rope_and_write(
            qkv,
            step.positions,
            rotary,
            step.blocks,
            step.offsets,
            keys,
            values,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=of_query,
            k_norm=of_key,
            eps=config.rms_norm_eps,
            plus_one=config.gemma_norms,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    def attend(
        self, step: GpuStep, query: torch.Tensor, cache: LayerCache, window: int
    ) -> torch.Tensor:
        keys, values, *scales = cache
        key_scales, value_scales = scales or (None, None)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = len(step.decode_context_lens)
        options: dict[str, Any] = {
            "scale": self._config.attention_scale,
            "window": window,
            "softcap": self._config.attention_softcap or 0.0,
            "key_scales": key_scales,
            "value_scales": value_scales,
        }
        if decodes:  # zeros for other rows, which the chunks overwrite
            paged_decode(
                query[:decodes],
                keys,
                values,
                step.tables[:decodes],
                step.decode_context_lens,
                self._workspaces[window],
                out=out[:decodes],
                pdl=pdl_works(query.device),
                **options,
            )
        if step.tiles is not None:
            assert step.query_starts is not None
            paged_prefill(
                query,
                keys,
                values,
                step.tables,
                step.query_starts,
                step.context_lens,
                step.tiles,
                out=out,
                **options,
            )
        return out.view(len(query), -1)

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        if self.ranks.size == 1:
            return linear(x, residual=hidden, out=hidden)
        # Only rank 0 adds the hidden state.
        added = hidden if self.ranks.rank == 0 else None
        return self.ranks.all_reduce(linear(x, residual=added, out=hidden))

    def add_normed_linear(
        self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear, norm: torch.Tensor
    ) -> torch.Tensor:
        return hidden.add_(self.norm(self.ranks.all_reduce(linear(x)), norm))

    def gated_linear(
        self, hidden: torch.Tensor, norm: torch.Tensor, linear: Linear
    ) -> torch.Tensor:
        act = cast("Activation", self._config.activation)
        return linear.gated(hidden, act, self._norm(norm))

    def add_experts(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        router: Linear,
        experts: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        mixture, ranks = self._config.moe, self.ranks
        assert mixture is not None
        x = self.norm(hidden, norm)
        summed = moe(
            x,
            router(x),
            *experts,
            top_k=mixture.per_token,
            renormalize=mixture.renormalize,
            act=self._config.activation,
            residual=hidden if ranks.rank == 0 else None,
            out=hidden,
            batch_invariant=self.batch_invariant,
        )
        return ranks.all_reduce(summed)

    def sampled(self, step: GpuStep, x: torch.Tensor) -> torch.Tensor:
        self.row_adapters = self._sample_adapters
        return x if step.sampled_rows is None else x[step.sampled_rows]

    def logits(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        vocab_size = self._config.vocab_size
        if self._logits is None:  # one for all graphs
            self._logits = torch.empty(
                self._max_sampled, vocab_size, dtype=x.dtype, device=x.device
            )
        logits = self._logits[: len(x)]
        if self.ranks.size > 1:
            logits.copy_(self.ranks.gather_columns(linear(x), vocab_size))
        else:
            linear(x, out=logits)
        cap = self._config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class AdaptedLinear:
    def __init__(self, base: Linear, operations: GpuOperations) -> None:
        self.out_features, self.in_features = base.out_features, base.in_features
        self._base, self._operations = base, operations
        self._widths: tuple[int, ...] = ()
        self._down = self._up = torch.empty(0)

    def make_room(self, site: Site, slots: int, rank: int, dtype: torch.dtype) -> None:
        self._widths, device = site.rows, self._base.device
        self._down = torch.zeros(
            slots, len(site.rows) * rank, site.in_features, dtype=dtype, device=device
        )
        self._up = torch.zeros(slots, sum(site.rows), rank, dtype=dtype, device=device)

    def prepare(self, down: torch.Tensor, up: torch.Tensor) -> Matrices:
        return (down.pin_memory(), up.pin_memory()) if self._down.is_cuda else (down, up)

    def put(self, slot: int, matrices: Matrices | None) -> None:
        """Queue a slot's prepared matrices, or zeros, behind what uses it now."""
        for held, given in zip((self._down, self._up), matrices or (None, None), strict=True):
            if given is None:
                held[slot].zero_()
            else:
                held[slot].copy_(given, non_blocking=True)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = self._operations.row_adapters
        if rows is None or not self._widths:
            return self._base(x, residual=residual, out=out)
        tiles = default_tiles(
            INVARIANT_ROWS if self._operations.batch_invariant else len(x), x.shape[1]
        )
        # Before the layer's product, which fetches weights meanwhile.
        low = shrink(x, self._down, rows, tiles=tiles)
        y = self._base(x, residual=residual, out=out)
        return expand(low, self._up, rows, y, self._widths, tiles=tiles)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._operations.row_adapters is None:
            return self._base.normed(x, norm)
        return self(rms_norm(x, *norm))

    def gated(self, x: torch.Tensor, act: Activation, norm: Norm) -> torch.Tensor:
        if self._operations.row_adapters is None:
            return self._base.gated(x, act, norm)
        x = rms_norm(x, *norm)
        # Adapters add before the activation.
        return act_and_mul(self(x), act)
