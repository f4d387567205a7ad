"""The decoder-only transformer of Llama, Mistral, Qwen2 and Qwen3: one file, differences declared in ModelConfig.

Owns the weights and the forward pass of one rank over paged KV. Knows nothing of requests, scheduling or sampling, and
leaves to its Operations how a device computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paged_engine.kv_pool import KVPool
from paged_engine.model_config import ModelConfig, RopeScaling, tensor_shapes
from paged_engine.operations import Norm, Operations, QkNorm
from wire.errors import ConfigError

__all__ = ["Decoder", "rope_frequencies"]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Norm
    qkv: Any  # a Linear of the device
    qk_norm: QkNorm | None
    o: Any
    post_norm: Norm
    gate_up: Any
    down: Any


class Decoder:
    """Weights ready for the forward pass.

    `tensors` yields (Hugging Face name, tensor) in any order; each is dropped once it is packed. Raises ConfigError
    naming the tensors that are missing or have another shape than `config` says.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        operations: Operations[Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self._operations = operations
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
        self._lm_head = operations.linear(head, None)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), rope_frequencies(config))
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)  # [max_positions, head_dim]

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

        def fused(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight = torch.cat([have[f"{n}.weight"] for n in names])
            bias = torch.cat([have[f"{n}.bias"] for n in names]) if f"{names[0]}.bias" in have else None
            return weight, bias

        config, linear = self.config, self._operations.linear
        qk_norm = None
        if config.qk_norm:
            query, key = have["self_attn.q_norm.weight"], have["self_attn.k_norm.weight"]
            qk_norm = QkNorm(query, key, config.rms_norm_eps)
        qkv, qkv_bias = fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up, gate_up_bias = fused("mlp.gate_proj", "mlp.up_proj")
        input_norm, qkv = self._fold(have["input_layernorm.weight"], qkv)
        post_norm, gate_up = self._fold(have["post_attention_layernorm.weight"], gate_up)
        self._layers[index] = _Layer(
            input_norm=input_norm,
            qkv=linear(qkv, qkv_bias),
            qk_norm=qk_norm,
            o=linear(*fused("self_attn.o_proj")),
            post_norm=post_norm,
            gate_up=linear(gate_up, gate_up_bias),
            down=linear(*fused("mlp.down_proj")),
        )

    def _fold(self, norm: torch.Tensor, weight: torch.Tensor) -> tuple[Norm, torch.Tensor]:
        """The norm and the weight of the product behind it, made one where the device wants that."""
        eps = self.config.rms_norm_eps
        return (Norm(None, eps), weight * norm) if self._operations.folds(self.dtype) else (Norm(norm, eps), weight)

    @torch.inference_mode()
    def forward(self, step: Any, pool: KVPool) -> torch.Tensor:
        """Write the step's KV into `pool` and return the logits [S, vocab] of the sampled rows."""
        ops = self._operations
        rotary = ops.rotary(step, self._cos_sin)
        hidden = ops.embed(step, self._embedding)
        for layer, cache in zip(self._layers, pool.layers, strict=True):
            assert layer is not None
            qkv = ops.normed_linear(hidden, layer.input_norm, layer.qkv)
            query = ops.rotate_and_write(step, qkv, rotary, layer.qk_norm, cache)
            mixed = ops.attend(step, query, cache, self.config.window)
            hidden = ops.add_linear(hidden, mixed, layer.o)
            inner = ops.gated_linear(hidden, layer.post_norm, layer.gate_up)
            hidden = ops.add_linear(hidden, inner, layer.down)
        return ops.logits(ops.final_norm(step, hidden, self._norm), self._lm_head)

    def linears(self) -> list[Any]:
        """One linear layer of each shape."""
        first = self._layers[0]
        assert first is not None
        return [first.qkv, first.o, first.gate_up, first.down, self._lm_head]


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
