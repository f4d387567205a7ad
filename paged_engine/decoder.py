"""Decoder-only models of every supported architecture, over the operations of a device.

Activations are [T, features] for a step's T tokens; `step` is the device's type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import stored_weights, weight_shapes
from kvrelay.paged_engine.rope import rope_frequencies, rope_variant

if TYPE_CHECKING:
    from kvrelay.paged_engine.cpu_operations import CpuOperations
    from kvrelay.paged_engine.gpu_operations import GpuOperations

__all__ = ["Decoder", "LayerCache", "QkNorm", "split_fused"]

Operations: TypeAlias = "CpuOperations | GpuOperations"
LayerCache = tuple[torch.Tensor, ...]
"""One layer's keys and values, [num_blocks, kv_heads, block_size, head_dim], and in fp8 scales."""
QkNorm = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] of the RMS norms of query and key heads."""

_LAYERS = "model.layers."
# The norms of attention's and the MLP's inputs and outputs.
_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class _Layer:
    window: int
    rope: int  # which of the rotary tables
    input_norm: torch.Tensor
    qkv: Any
    qk_norm: QkNorm | None
    o: Any
    o_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    router: Any  # None in a dense layer
    up: Any  # the gate's rows, then those of up; with a router those of all experts and down
    down: Any
    down_norm: torch.Tensor | None


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

    Takes what `split_fused` yields, in any order; packed weights are dropped.
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
        head = self._embedding if config.tie_embeddings else parts["lm_head.weight"]
        self._norm = parts["model.norm.weight"]
        self._lm_head: Any = operations.output_layer(head)
        self.rope_variant = rope_variant(config.rope_scaling, max_positions)
        tables = _rotary_tables(config, max_positions)
        self._cos_sin = [table.to(device) for table in tables]

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
        config, ops = self.config, self._operations
        input_norm, o_norm, mlp_norm, down_norm = (
            None if name is None else have[f"{name}.weight"]
            for name in (_GEMMA_NORMS if config.gemma_norms else _NORMS)
        )
        assert input_norm is not None
        assert mlp_norm is not None
        qk_norm = None
        if config.qk_norm:
            qk_norm = have["self_attn.q_norm.weight"], have["self_attn.k_norm.weight"]
        qkv = _fused(have, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        window, mixture = config.layer_window(index), config.layer_experts(index)
        router: Any = None
        up: Any
        down: Any = None
        if mixture is None:
            up = ops.linear(*_fused(have, "mlp.gate_proj", "mlp.up_proj"))
            down = ops.linear(*_fused(have, "mlp.down_proj"))
        else:
            experts = [f"mlp.experts.{expert}" for expert in range(mixture.experts)]
            router = ops.linear(have["mlp.router.weight"], None)
            up = ops.experts(
                torch.stack([_fused(have, f"{e}.gate_proj", f"{e}.up_proj")[0] for e in experts]),
                torch.stack([have[f"{e}.down_proj.weight"] for e in experts]),
            )
        return _Layer(
            window=window,
            rope=1 if window and config.local_rope_theta else 0,
            input_norm=input_norm,
            qkv=ops.linear(*qkv),
            qk_norm=qk_norm,
            o=ops.linear(*_fused(have, "self_attn.o_proj")),
            o_norm=o_norm,
            mlp_norm=mlp_norm,
            router=router,
            up=up,
            down=down,
            down_norm=down_norm,
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
        rotaries: list[Any] = [ops.rotary(step, table) for table in self._cos_sin]
        hidden = ops.embed(step, self._embedding)
        for layer, cache in zip(self._layers, pool.layers, strict=True):
            qkv = ops.normed_linear(hidden, layer.input_norm, layer.qkv)
            query = ops.rotate_and_write(step, qkv, rotaries[layer.rope], layer.qk_norm, cache)
            mixed = ops.attend(step, query, cache, layer.window)
            if layer is self._layers[-1]:
                # Of a prompt, only the last token goes on.
                hidden, mixed = ops.sampled(step, hidden), ops.sampled(step, mixed)
                if not len(hidden):
                    ops.ranks.all_reduce(qkv.new_zeros(1))  # see ranks.py
                    return hidden
            hidden = self._add(hidden, mixed, layer.o, layer.o_norm)
            if layer.router is not None:
                hidden = ops.add_experts(hidden, layer.mlp_norm, layer.router, layer.up)
            else:
                activated = ops.gated_linear(hidden, layer.mlp_norm, layer.up)
                hidden = self._add(hidden, activated, layer.down, layer.down_norm)
        return hidden

    def _add(
        self, hidden: torch.Tensor, x: torch.Tensor, linear: Any, norm: torch.Tensor | None
    ) -> torch.Tensor:
        if norm is None:
            return self._operations.add_linear(hidden, x, linear)
        return self._operations.add_normed_linear(hidden, x, linear, norm)

    def sites(self) -> list[dict[str, Any]]:
        return [
            {"qkv": layer.qkv, "o": layer.o}
            | ({"up": layer.up, "down": layer.down} if layer.router is None else {})
            for layer in self._layers
        ]

    def linears(self) -> list[Any]:
        linears = [linear for sites in self.sites() for linear in sites.values()]
        linears += [layer.router for layer in self._layers if layer.router is not None]
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


def _rotary_tables(config: ModelConfig, max_positions: int) -> list[torch.Tensor]:
    kinds = [(config.rope_scaling, config.rope_theta)]
    if config.local_rope_theta is not None:
        kinds.append((None, config.local_rope_theta))
    tables = []
    for scaling, theta in kinds:
        frequencies, factor = rope_frequencies(scaling, theta, config.rotary_dim, max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        tables.append(torch.cat((angles.cos(), angles.sin()), dim=-1) * factor)
    return tables
