"""Adapters on a GPU: their slots, and the decoder's operations with what a row's adapter adds to a
linear layer.

A step in which no row has an adapter runs the very kernels of an engine without any: which of the
two it is, the host knows, and there are graphs of each kind. A row's adapter is read on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from kvrelay.kernels.fused_act import act_and_mul
from kvrelay.kernels.fused_norm import rms_norm
from kvrelay.kernels.grouped_lora import INVARIANT_ROWS, default_tiles, expand, shrink
from kvrelay.kernels.skinny_gemm import Activation
from kvrelay.paged_engine.adapter_layout import Site, sites_of, stacked
from kvrelay.paged_engine.gpu_operations import GpuOperations, GpuStep, Linear
from kvrelay.paged_engine.lora_files import Adapter, Matrices
from kvrelay.paged_engine.model_config import ModelConfig

__all__ = ["GpuAdapterOperations", "GpuAdapters"]

Prepared = list[dict[str, Matrices]]
"""Of each layer its adapted sites: A and B in pinned memory."""


@dataclass(slots=True)
class _Rows:
    """The adapter of each row of the activations, in the layer that is being computed; None: no row
    has one.
    """

    now: torch.Tensor | None = None


class AdaptedLinear:
    """A linear layer and what the adapters of its rows add to it. Methods as GpuLinear's."""

    def __init__(self, base: Linear, rows: _Rows, *, batch_invariant: bool) -> None:
        self.out_features, self.in_features = base.out_features, base.in_features
        self._base, self._rows, self._batch_invariant = base, rows, batch_invariant
        self._widths: tuple[int, ...] = ()
        self._down = self._up = torch.empty(0)

    def make_room(self, site: Site, slots: int, rank: int, dtype: torch.dtype) -> None:
        """Memory for the matrices of all slots; layers without take no adapter."""
        assert (sum(site.rows), site.in_features) == (self.out_features, self.in_features)
        self._widths, device = site.rows, self._base.device
        self._down = torch.zeros(
            slots, len(site.rows) * rank, site.in_features, dtype=dtype, device=device
        )
        self._up = torch.zeros(slots, sum(site.rows), rank, dtype=dtype, device=device)

    def put(self, slot: int, matrices: Matrices | None) -> None:
        """Queue a slot's matrices, or zeros, behind what uses it now."""
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
        pdl: bool = False,
    ) -> torch.Tensor:
        rows = self._rows.now
        if rows is None or not self._widths:
            return self._base(x, residual=residual, out=out, pdl=pdl)
        tiles = default_tiles(INVARIANT_ROWS if self._batch_invariant else len(x), x.shape[1])
        # Before the layer's own product, which can fetch its first weights meanwhile.
        low = shrink(x, self._down, rows, pdl=pdl, tiles=tiles)
        y = self._base(x, residual=residual, out=out, pdl=pdl)
        return expand(low, self._up, rows, y, self._widths, pdl=pdl, tiles=tiles)

    def normed(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        plus_one: bool = False,
        pdl: bool = False,
    ) -> torch.Tensor:
        if self._rows.now is None:
            return self._base.normed(x, norm_weight, eps, plus_one=plus_one, pdl=pdl)
        return self(rms_norm(x, norm_weight, eps, plus_one=plus_one, pdl=pdl), pdl=pdl)

    def gated(
        self,
        x: torch.Tensor,
        act: Activation,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        plus_one: bool = False,
        out: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        if self._rows.now is None:
            return self._base.gated(
                x, act, norm_weight=norm_weight, eps=eps, plus_one=plus_one, out=out, pdl=pdl
            )
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, eps, plus_one=plus_one, pdl=pdl)
        # What adapters add comes before the activation, so that is a launch of its own here.
        return act_and_mul(self(x, pdl=pdl), act, out=out, pdl=pdl)


class GpuAdapterOperations(GpuOperations):
    """GpuOperations whose linear layers take adapters."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As GpuOperations."""
        super().__init__(*arguments, **options)
        self._rows = _Rows()
        self._of_samples: torch.Tensor | None = None

    def plan(self, step: GpuStep, block_size: int) -> None:
        super().plan(step, block_size)
        self._rows.now = self._of_samples = step.adapters
        if step.adapters is not None and step.sampled_rows is not None:
            self._of_samples = step.adapters[step.sampled_rows]

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Linear:
        base = super().linear(weight, bias, scale)
        return cast(
            "Linear", AdaptedLinear(base, self._rows, batch_invariant=self._batch_invariant)
        )

    def sampled(self, step: GpuStep, x: torch.Tensor) -> torch.Tensor:
        self._rows.now = self._of_samples
        return super().sampled(step, x)


class GpuAdapters:
    """The slots of one rank. See `AdapterStore` in paged_engine/adapters.py."""

    def __init__(
        self,
        model: ModelConfig,
        linears: Sequence[Mapping[str, AdaptedLinear]],
        *,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the memory of all slots. `linears` are `Decoder.sites`."""
        self._sites, self._linears, self._dtype, self._device = (
            sites_of(model),
            linears,
            dtype,
            device,
        )
        self._rank = -(-max_rank // 16) * 16  # what a tensor core multiplies
        for sites, layer in zip(self._sites, linears, strict=True):
            for name, site in sites.items():
                layer[name].make_room(site, slots, self._rank, dtype)

    def prepare(self, adapter: Adapter) -> Prepared:
        with torch.cuda.device(self._device):  # a thread begins on the first GPU
            return [
                {
                    name: (matrices[0].pin_memory(), matrices[1].pin_memory())
                    for name, site in sites.items()
                    if (matrices := stacked(adapter.modules, site, self._rank, self._dtype))
                    is not None
                }
                for sites in self._sites
            ]

    def install(self, slot: int, prepared: Prepared) -> None:
        for linears, sites, given in zip(self._linears, self._sites, prepared, strict=True):
            for name in sites:
                linears[name].put(slot, given.get(name))

    def remove(self, slot: int) -> None:
        """Nothing: whoever comes next overwrites all of it."""
