"""Low-rank adapters in torch, y += B (A x): the CPU path.

A layer's projections are side by side: `down` holds their A's one above the other, `rank` rows
each, `up` their B's. Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvrelay.kernels.linear import Linear

__all__ = ["PackedLora"]


class PackedLora:
    """An adapter's matrices at one layer, packed; products have at least `min_rows`."""

    def __init__(
        self, down: torch.Tensor, up: torch.Tensor, widths: Sequence[int], min_rows: int
    ) -> None:
        """Pack down [projections * rank, K] and up [N, rank]."""
        self._rank, self._min_rows = up.shape[1], min_rows
        self._down = Linear(down)
        self._ups = [Linear(part) for part in torch.split(up, list(widths))]

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Add B (A x[rows]) to y[rows] in place; y [T, N], x [T, K], rows [R] int64."""
        mine = functional.pad(x[rows], (0, 0, 0, max(0, self._min_rows - len(rows))))
        first = 0  # column of y
        for up, low in zip(self._ups, torch.split(self._down(mine), self._rank, 1), strict=True):
            y[rows, first : first + up.out_features] += up(low.contiguous())[: len(rows)]
            first += up.out_features
