"""Decoder-only models of every supported architecture, over the operations of a device.

Activations are [T, features] for the T tokens of a step; `step` is the device's own type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import (
    POSITION_OFFSET,
    stored_weights,
    weight_shapes,
)
from kvrelay.paged_engine.rope import rope_frequencies, rope_variant

if TYPE_CHECKING:
    from kvrelay.paged_engine.cpu_operations import CpuOperations
    from kvrelay.paged_engine.gpu_operations import GpuOperations

__all__ = ["Decoder", "LayerCache", "Norm", "QkNorm", "split_fused"]

Operations: TypeAlias = "CpuOperations | GpuOperations"
LayerCache = tuple[torch.Tensor, ...]
"""One layer's keys and values, [num_blocks, kv_heads, block_size, head_dim], and in fp8 scales."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over the features, or with `bias` a layer norm.

    With `plus_one` the factor is 1 + weight.
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class QkNorm:
    """A pair of RMS norms of query and key heads, [head_dim] each."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    plus_one: bool = False


_LAYERS = "model.layers."
# By norm_places: the norms of attention's input and output, of the MLP's input and output.
_NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "after": (None, "input_layernorm", None, "post_attention_layernorm"),
}


@dataclass(frozen=True, slots=True)
class _Mlp:
    up: Any  # the gate's rows, if any, then those of up
    down: Any


@dataclass(frozen=True, slots=True)
class _Experts:
    router: Any
    experts: Any


@dataclass(frozen=True, slots=True)
class _Layer:
    window: int
    rope: int  # which of the rotary tables
    input_norm: Norm | None
    qkv: Any
    qk_norm: QkNorm | None
    o: Any
    o_norm: Norm | None
    mlp_norm: Norm | None
    mlp: _Mlp | _Experts
    down_norm: Norm | None


def split_fused(
    config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors as our weights, those stored in one tensor apart."""
    shapes, stored = weight_shapes(config), stored_weights(config)
    for name, tensor in tensors:
        rows = [shapes[ours][0] for ours in stored[name]]
        yield from zip(stored[name], torch.split(tensor, rows), strict=True)


class Decoder:
    """A decoder with its weights, ready for the forward pass.

    Takes what `split_fused` yields, in any order; each weight is dropped once it is packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        operations: Operations,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self._operations = operations
        self._layers, parts = self._load(weights)
        self._embedding = parts["model.embed_tokens.weight"]
        self._positions = (
            parts["model.embed_positions.weight"][POSITION_OFFSET:]
            if config.learned_positions
            else None
        )
        head = self._embedding if config.tie_embeddings else parts["lm_head.weight"]
        self._norm = self._norm_at(parts, "model.norm")
        self._lm_head: Any = operations.output_layer(head)
        self.rope_variant = rope_variant(config.rope_scaling, max_positions)
        tables = _rotary_tables(config, max_positions)
        self._cos_sin = [None if table is None else table.to(device) for table in tables]

    def _load(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[list[_Layer], dict[str, torch.Tensor]]:
        shapes, parts = weight_shapes(self.config), dict[str, torch.Tensor]()
        sizes = Counter(_layer_of(name) for name in shapes)
        unpacked: dict[int, dict[str, torch.Tensor]] = {}
        packed: dict[int, _Layer] = {}
        for name, tensor in weights:
            in_fp8 = f"{name}_scale" in shapes or name.endswith("_scale")
            part = tensor.to(self.device, None if in_fp8 else self.dtype)
            index = _layer_of(name)
            if index is None:
                parts[name] = part
                continue
            unpacked.setdefault(index, {})[name.removeprefix(f"{_LAYERS}{index}.")] = part
            if len(unpacked[index]) == sizes[index]:
                packed[index] = self._pack(index, unpacked.pop(index))
        return [packed[index] for index in range(self.config.num_layers)], parts

    def _pack(self, index: int, have: dict[str, torch.Tensor]) -> _Layer:
        config = self.config
        input_norm, o_norm, mlp_norm, down_norm = (
            None if name is None else self._norm_at(have, name)
            for name in _NORMS[config.norm_places]
        )
        qk_norm = None
        if config.qk_norm:
            query, key = have["self_attn.q_norm.weight"], have["self_attn.k_norm.weight"]
            qk_norm = QkNorm(query, key, config.rms_norm_eps, config.norm == "rms_plus_one")
        qkv = _fused(have, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        window = config.layer_window(index)
        return _Layer(
            window=window,
            rope=1 if window and config.local_rope_theta else 0,
            input_norm=input_norm,
            qkv=self._operations.linear(*qkv),
            qk_norm=qk_norm,
            o=self._operations.linear(*_fused(have, "self_attn.o_proj")),
            o_norm=o_norm,
            mlp_norm=mlp_norm,
            mlp=self._pack_mlp(index, have),
            down_norm=down_norm,
        )

    def _pack_mlp(self, index: int, have: dict[str, torch.Tensor]) -> _Mlp | _Experts:
        mixture = self.config.layer_experts(index)
        halves = ("gate_proj", "up_proj") if self.config.gated else ("up_proj",)
        if mixture is None:
            up = _fused(have, *(f"mlp.{half}" for half in halves))
            return _Mlp(
                self._operations.linear(*up),
                self._operations.linear(*_fused(have, "mlp.down_proj")),
            )
        experts = [f"mlp.experts.{expert}" for expert in range(mixture.experts)]
        gate_up = torch.stack(
            [_fused(have, *(f"{expert}.{half}" for half in halves))[0] for expert in experts]
        )
        down = torch.stack([have[f"{expert}.down_proj.weight"] for expert in experts])
        router = self._operations.linear(have["mlp.router.weight"], None)
        return _Experts(router, self._operations.experts(gate_up, down))

    def _norm_at(self, have: dict[str, torch.Tensor], name: str) -> Norm | None:
        if f"{name}.weight" not in have:
            return None
        plus_one = self.config.norm == "rms_plus_one"
        return Norm(
            have[f"{name}.weight"], self.config.rms_norm_eps, have.get(f"{name}.bias"), plus_one
        )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return hidden.new_empty(0, self.config.vocab_size)
        return self._operations.logits(self._operations.norm(hidden, self._norm), self._lm_head)

    @torch.inference_mode()
    def hidden(self, step: Any, pool: KVPool) -> torch.Tensor:
        """Write the step's KV; return hidden states [S, hidden] of the sampled rows."""
        ops = self._operations
        rotaries: list[Any] = [
            None if table is None else ops.rotary(step, table) for table in self._cos_sin
        ]
        hidden = ops.embed(step, self._embedding)
        if self._positions is not None:
            hidden = ops.add_positions(step, hidden, self._positions)
        for layer, cache in zip(self._layers, pool.layers, strict=True):
            qkv = ops.normed_linear(hidden, layer.input_norm, layer.qkv)
            query = ops.rotate_and_write(step, qkv, rotaries[layer.rope], layer.qk_norm, cache)
            mixed = ops.attend(step, query, cache, layer.window)
            if layer is self._layers[-1]:
                # Of a prompt, only the last token goes on.
                hidden, mixed = ops.sampled(step, hidden), ops.sampled(step, mixed)
                if not len(hidden):
                    ops.barrier(qkv)  # see ranks.py
                    return hidden
            hidden = self._add(hidden, mixed, layer.o, layer.o_norm)
            hidden = self._add_mlp(hidden, layer)
        return hidden

    def _add(
        self, hidden: torch.Tensor, x: torch.Tensor, linear: Any, norm: Norm | None
    ) -> torch.Tensor:
        ops = self._operations
        if norm is None:
            return ops.add_linear(hidden, x, linear)
        if self.config.norm_places == "around":
            return ops.add_normed_linear(hidden, x, linear, norm)
        return ops.norm(ops.add_linear(hidden, x, linear), norm)

    def _add_mlp(self, hidden: torch.Tensor, layer: _Layer) -> torch.Tensor:
        ops, mlp = self._operations, layer.mlp
        if isinstance(mlp, _Experts):
            assert layer.mlp_norm is not None
            return ops.add_experts(hidden, layer.mlp_norm, mlp.router, mlp.experts)
        activated = ops.gated_linear if self.config.gated else ops.relu_linear
        return self._add(
            hidden, activated(hidden, layer.mlp_norm, mlp.up), mlp.down, layer.down_norm
        )

    def sites(self) -> list[dict[str, Any]]:
        """Return each layer's linear layers that take adapters: qkv, o, up and down."""
        return [
            {"qkv": layer.qkv, "o": layer.o}
            | (
                {}
                if isinstance(layer.mlp, _Experts)
                else {"up": layer.mlp.up, "down": layer.mlp.down}
            )
            for layer in self._layers
        ]

    def linears(self) -> list[Any]:
        linears = [linear for sites in self.sites() for linear in sites.values()]
        linears += [layer.mlp.router for layer in self._layers if isinstance(layer.mlp, _Experts)]
        linears.append(self._lm_head)
        return list({(each.out_features, each.in_features): each for each in linears}.values())


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith(_LAYERS) else None


def _fused(
    have: dict[str, torch.Tensor], *names: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    def joined(kind: str) -> torch.Tensor | None:
        return (
            torch.cat([have[f"{name}.{kind}"] for name in names])
            if f"{names[0]}.{kind}" in have
            else None
        )

    weight = joined("weight")
    assert weight is not None
    return weight, joined("bias"), joined("weight_scale")


def _rotary_tables(config: ModelConfig, max_positions: int) -> list[torch.Tensor] | list[None]:
    if config.learned_positions:
        return [None]
    kinds = [(config.rope_scaling, config.rope_theta)]
    if config.local_rope_theta is not None:
        kinds.append((None, config.local_rope_theta))
    tables = []
    for scaling, theta in kinds:
        frequencies, factor = rope_frequencies(scaling, theta, config.rotary_dim, max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        tables.append(torch.cat((angles.cos(), angles.sin()), dim=-1) * factor)
    return tables
