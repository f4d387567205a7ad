"""The decoder-only transformer of Llama, Mistral, Qwen2 and Qwen3: one file, differences declared in ModelConfig.

Owns the weights and the forward pass of one rank over paged KV. Knows nothing of requests, scheduling or sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.kv_write import write_kv
from kernels.linear import Linear, rows_are_invariant
from kernels.norm_rope_act import apply_rope, rms_norm, silu_and_mul
from kernels.paged_attention import AttentionPlan, attend
from paged_engine.kv_pool import KVPool
from paged_engine.model_config import ModelConfig, RopeScaling, tensor_shapes
from wire.errors import ConfigError

__all__ = ["Decoder", "StepInput", "rope_frequencies"]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's tokens as tensors; T tokens of all scheduled requests, one after the other."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position in its own sequence
    blocks: torch.Tensor  # [T] int64, block that takes the token's KV
    offsets: torch.Tensor  # [T] int64, place in that block
    sampled_rows: torch.Tensor  # [S] int64, rows whose logits are wanted
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor | None  # None where it is folded into qkv
    qkv: Linear
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    o: Linear
    post_norm: torch.Tensor | None  # None where it is folded into gate_up
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights ready for the forward pass.

    `tensors` yields (Hugging Face name, tensor) in any order; each is dropped once it is packed. Raises ConfigError
    naming the tensors that are missing or have another shape than `config` says.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self._layers: list[_Layer | None] = [None] * config.num_layers
        parts: dict[str, torch.Tensor] = {}
        shapes = tensor_shapes(config)
        for name, tensor in tensors:
            if name not in shapes:
                continue
            if tuple(tensor.shape) != shapes[name]:
                raise ConfigError(f"tensor {name} has shape {tuple(tensor.shape)}, the config wants {shapes[name]}")
            parts[name] = tensor.to(device=device, dtype=dtype)
            self._pack_finished_layer(name, parts, shapes)
        missing = [f"layer {i}" for i, layer in enumerate(self._layers) if layer is None]
        missing += [name for name in ("model.embed_tokens.weight", "model.norm.weight") if name not in parts]
        if not config.tie_embeddings and "lm_head.weight" not in parts:
            missing.append("lm_head.weight")
        if missing:
            raise ConfigError(f"the model files lack tensors of: {', '.join(missing[:8])}")
        self._embedding = parts["model.embed_tokens.weight"]
        head = self._embedding if config.tie_embeddings else parts["lm_head.weight"]
        self._norm, head = self._fold(parts["model.norm.weight"], head)
        self._lm_head = Linear(head)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), rope_frequencies(config))
        self._cos = angles.cos().to(device=device, dtype=dtype)[:, None]  # [max_positions, 1, head_dim / 2]
        self._sin = angles.sin().to(device=device, dtype=dtype)[:, None]

    def _pack_finished_layer(
        self, name: str, parts: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        if not name.startswith("model.layers."):
            return
        index = int(name.split(".")[2])
        prefix = f"model.layers.{index}."
        wanted = [key for key in shapes if key.startswith(prefix)]
        if not all(key in parts for key in wanted):
            return
        have = {key.removeprefix(prefix): parts.pop(key) for key in wanted}

        def fused(*names: str, norm: str = "") -> tuple[torch.Tensor | None, Linear]:
            weight = torch.cat([have[f"{n}.weight"] for n in names])
            bias = torch.cat([have[f"{n}.bias"] for n in names]) if f"{names[0]}.bias" in have else None
            scale, weight = self._fold(have[norm], weight) if norm else (None, weight)
            return scale, Linear(weight, bias)

        config, qk_norm = self.config, None
        if config.qk_norm:
            qk_norm = torch.cat(
                (
                    have["self_attn.q_norm.weight"].expand(config.num_heads, -1),
                    have["self_attn.k_norm.weight"].expand(config.num_kv_heads, -1),
                )
            ).contiguous()
        input_norm, qkv = fused(
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", norm="input_layernorm.weight"
        )
        post_norm, gate_up = fused("mlp.gate_proj", "mlp.up_proj", norm="post_attention_layernorm.weight")
        self._layers[index] = _Layer(
            input_norm=input_norm,
            qkv=qkv,
            qk_norm=qk_norm,
            o=fused("self_attn.o_proj")[1],
            post_norm=post_norm,
            gate_up=gate_up,
            down=fused("mlp.down_proj")[1],
        )

    def _fold(self, norm: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """W (g * x) = (W * g) x: in fp32 the norm's weight goes into the product behind it, one operation less a step.

        Not in 16 bits, where the rounding of W * g would show.
        """
        return (None, weight * norm) if self.dtype == torch.float32 else (norm, weight)

    @torch.inference_mode()
    def forward(self, step: StepInput, pool: KVPool) -> torch.Tensor:
        """Write the step's KV into `pool` and return fp32 logits [S, vocab] of the sampled rows."""
        config = self.config
        rotated = config.num_heads + config.num_kv_heads
        cos, sin = self._cos[step.positions], self._sin[step.positions]  # [T, 1, head_dim / 2]
        hidden = functional.embedding(step.token_ids, self._embedding)  # [T, hidden]
        tokens = hidden.shape[0]
        for layer, (key_cache, value_cache) in zip(self._layers, pool.layers, strict=True):
            assert layer is not None
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, config.rms_norm_eps))
            heads = qkv.view(tokens, rotated + config.num_kv_heads, config.head_dim)
            qk = heads[:, :rotated]
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
            qk = apply_rope(qk, cos, sin)
            write_kv(key_cache, value_cache, qk[:, config.num_heads :], heads[:, rotated:], step.blocks, step.offsets)
            mixed = attend(qk[:, : config.num_heads], key_cache, value_cache, step.attention)
            hidden = hidden + layer.o(mixed.reshape(tokens, -1))
            normed = rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
            hidden = hidden + layer.down(silu_and_mul(layer.gate_up(normed)))
        final = rms_norm(hidden[step.sampled_rows], self._norm, config.rms_norm_eps)
        return self._lm_head(final).float()

    def min_rows(self) -> int:
        """Fewest rows of a step for which a row's bits do not depend on the others, by trial on this machine.

        A GPU's matrix library changes its kernel with the batch at every size: there is nothing to pad to. Raises
        ConfigError where a CPU's does so too, because the CPU path promises to be batch-invariant.
        """
        if self.device.type != "cpu":
            return 1
        first = self._layers[0]
        assert first is not None
        linears = (first.qkv, first.o, first.gate_up, first.down, self._lm_head)
        for rows in (1, 2, 4, 16):
            if all(rows_are_invariant(linear, rows, self.dtype) for linear in linears):
                return rows
        raise ConfigError("this machine's matrix library gives a row other bits in other batches; use dtype float32")


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angle per position of each rotary pair, fp32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's context extension: long wavelengths are stretched by `factor`, short ones kept, between them a blend.

    Source: "The Llama 3 herd of models", 2024, and its published reference configuration.
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # turns over the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
