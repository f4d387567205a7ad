"""Adapters on the CPU: their slots, and the decoder's operations with what a row's adapter adds to
a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvrelay.kernels.linear import Linear
from kvrelay.kernels.lora import PackedLora
from kvrelay.paged_engine.adapter_layout import Site, sites_of, stacked
from kvrelay.paged_engine.cpu_operations import CpuOperations, CpuStep, fewest_rows
from kvrelay.paged_engine.lora_files import Adapter
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.ranks import Ranks

__all__ = ["CpuAdapters", "CpuAdapterOperations"]

Prepared = list[dict[str, PackedLora]]
"""Of each layer its adapted sites."""


@dataclass(slots=True)
class _Rows:
    """Which rows of the activations are whose, in the layer that is being computed: slot and rows."""

    now: Sequence[tuple[int, torch.Tensor]] = ()


class AdaptedLinear(Linear):
    """A linear layer and what each slot's adapter adds to it."""

    def __init__(self, base: Linear, rows: _Rows) -> None:
        self.out_features, self.in_features, self.device = (
            base.out_features,
            base.in_features,
            base.device,
        )
        self.bias, self._base, self._rows = base.bias, base, rows
        self.slots: dict[int, PackedLora] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._base(x)
        for slot, rows in self._rows.now:
            if slot in self.slots:
                self.slots[slot].add(y, x, rows)
        return y


class CpuAdapterOperations(CpuOperations):
    """CpuOperations whose linear layers take adapters."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__(config, dtype, ranks)
        self._rows = _Rows()

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Linear:
        return AdaptedLinear(super().linear(weight, bias, scale), self._rows)

    def folds(self, dtype: torch.dtype) -> bool:
        return False  # A was trained behind the norm's weight

    def embed(self, step: CpuStep, table: torch.Tensor) -> torch.Tensor:
        self._rows.now = step.adapted
        return super().embed(step, table)

    def sampled(self, step: CpuStep, x: torch.Tensor) -> torch.Tensor:
        self._rows.now = step.adapted_samples
        return super().sampled(step, x)


class CpuAdapters:
    """The slots of one rank. See `AdapterStore` in paged_engine/adapters.py."""

    def __init__(
        self,
        model: ModelConfig,
        linears: Sequence[Mapping[str, AdaptedLinear]],
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        """`linears` are `Decoder.sites`. Raises ConfigError where products of these shapes are not
        batch-invariant.
        """
        self._sites, self._linears, self._rank, self._dtype = (
            sites_of(model),
            linears,
            max_rank,
            dtype,
        )
        self._min_rows = fewest_rows(_one_of_each(self._sites, max_rank, dtype), dtype)

    def prepare(self, adapter: Adapter) -> Prepared:
        layers: Prepared = []
        for sites in self._sites:
            found = {
                name: stacked(adapter.modules, site, self._rank, self._dtype)
                for name, site in sites.items()
            }
            layers.append(
                {
                    name: PackedLora(*matrices, sites[name].rows, self._min_rows)
                    for name, matrices in found.items()
                    if matrices is not None
                }
            )
        return layers

    def install(self, slot: int, prepared: Prepared) -> None:
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
    """A product of each shape that adapters have."""
    shapes: set[tuple[int, int]] = set()
    for site in (site for sites in layers for site in sites.values()):
        shapes |= {(len(site.rows) * rank, site.in_features), *((rows, rank) for rows in site.rows)}
    generator = torch.Generator().manual_seed(0)
    return [Linear(torch.randn(shape, generator=generator).to(dtype)) for shape in sorted(shapes)]
