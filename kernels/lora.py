"""Low-rank adapters in torch, y += B (A x): the CPU path.

A layer's projections are side by side: `down` holds their A's one above the other, `rank` rows
each, `up` their B's. Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvrelay.kernels.linear import Linear

__all__ = ["PackedLora"]


@dataclass(frozen=True, slots=True)
class _Up:
    first: int  # column of y
    linear: Linear


class PackedLora:
    """An adapter's matrices at one layer, packed; products have at least `min_rows`."""

    def __init__(
        self, down: torch.Tensor, up: torch.Tensor, widths: Sequence[int], min_rows: int
    ) -> None:
        """Pack down [projections * rank, K] and up [N, rank]."""
        self._rank, self._min_rows = up.shape[1], min_rows
        self._down = Linear(down)
        first, self._ups = 0, []
        for part in torch.split(up, list(widths)):
            self._ups.append(_Up(first, Linear(part)))
            first += len(part)

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Add B (A x[rows]) to y[rows] in place; y [T, N], x [T, K], rows [R] int64."""
        mine = functional.pad(x[rows], (0, 0, 0, max(0, self._min_rows - len(rows))))
        for up, low in zip(self._ups, torch.split(self._down(mine), self._rank, 1), strict=True):
            columns = slice(up.first, up.first + up.linear.out_features)
            y[rows, columns] += up.linear(low.contiguous())[: len(rows)]
