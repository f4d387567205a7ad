"""Where an adapter's matrices go: one *site* for each linear layer of the decoder, which may be
several projections.

A site's projections share their input, so their A's lie one above the other and their B's too: what
belongs together is known by position. Lower ranks are padded with zeros to the limit. Also what a
tensor-parallel rank holds: of B the rows whose outputs it computes, of A the columns whose inputs
it has; so adapters need no collective of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvrelay.paged_engine.lora_files import Adapter, Matrices
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import weight_shapes
from kvrelay.paged_engine.sharding import shard_weights

__all__ = ["Site", "shard_adapter", "sites_of", "stacked"]

_SITES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Of which a rank has a share of the inputs: A is cut, of all others B.
_CUT_INPUTS = (".o_proj", ".down_proj")


@dataclass(frozen=True, slots=True)
class Site:
    """One linear layer of the decoder. `modules` are the projections in it, `rows` how many outputs
    each has.
    """

    modules: tuple[str, ...]
    in_features: int
    rows: tuple[int, ...]


def sites_of(model: ModelConfig) -> list[dict[str, Site]]:
    """Of each layer: its linear layers by the names of `Decoder.sites`. A mixture's experts have
    none.
    """
    shapes = weight_shapes(replace(model, quantization=None))
    layers = []
    for index in range(model.num_layers):
        sites = {}
        for name, projections in _SITES.items():
            modules = [f"model.layers.{index}.{projection}" for projection in projections]
            modules = [module for module in modules if f"{module}.weight" in shapes]
            if modules:
                sizes = [shapes[f"{module}.weight"] for module in modules]
                sites[name] = Site(tuple(modules), sizes[0][1], tuple(size[0] for size in sizes))
        layers.append(sites)
    return layers


def shard_adapter(adapter: Adapter, model: ModelConfig, rank: int, size: int) -> Adapter:
    """What rank `rank` of `size` holds of an adapter of the whole model."""

    def cut(module: str, matrix: torch.Tensor) -> torch.Tensor:
        ((_, part),) = shard_weights([(f"{module}.weight", matrix)], model, rank, size)
        return part

    def matrices(module: str, a: torch.Tensor, b: torch.Tensor) -> Matrices:
        return (cut(module, a), b) if module.endswith(_CUT_INPUTS) else (a, cut(module, b))

    return replace(
        adapter,
        modules={module: matrices(module, *both) for module, both in adapter.modules.items()},
    )


def stacked(
    modules: Mapping[str, Matrices], site: Site, rank: int, dtype: torch.dtype
) -> Matrices | None:
    """A [projections * rank, in] and B [all outputs, rank] of a site, padded with zeros; None if it
    is not adapted.

    The rows of B that belong to projection i are for the outputs of the i-th `rank` rows of A.
    """
    if not any(module in modules for module in site.modules):
        return None
    a = torch.zeros(len(site.modules) * rank, site.in_features, dtype=dtype)
    b = torch.zeros(sum(site.rows), rank, dtype=dtype)
    for index, (module, ours) in enumerate(
        zip(site.modules, torch.split(b, list(site.rows)), strict=True)
    ):
        if module in modules:
            down, up = modules[module]
            a[index * rank : index * rank + len(down)] = down
            ours[:, : len(down)] = up
    return a, b
