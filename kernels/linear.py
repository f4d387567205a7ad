"""y = x W^T + b, with the weight packed once for the CPU.

oneDNN's packed fp32 weights halve the time of small batches (SmolLM2, 8 rows, one thread: 61
against 112 ms for a step's weights) and give a row the same bits beside any others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

__all__ = [
    "Linear",
    "PackedLora",
    "computed_rows",
    "fewest_invariant_rows",
    "packs",
    "rows_are_invariant",
]

# Packing for 256 rows costs nothing at 1 to 32; packing for 1 costs a third at 8 and more.
_PACK_ROWS = 256
_ROW_STEP = 4


def computed_rows(rows: int) -> int:
    """Return how many rows a product of so many computes: at most 3 or a quarter more.

    For each count of rows and shape oneDNN (3.12) generates code, milliseconds and 560 KB for good
    (AVX-512): with any count up to 256 an engine grew by 500 MB.
    """
    if rows <= _ROW_STEP:
        return 1 << max(0, rows - 1).bit_length()
    step = max(_ROW_STEP, 1 << max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN takes weights of this type on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }.get(dtype)
    return has is None or bool(has())


class Linear:
    """A weight [out_features, in_features] and an optional bias, ready to be applied."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.device = weight.device
        self.bias = bias
        self._packed = weight.device.type == "cpu" and packs(weight.dtype)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
            if self._packed
            else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            rows = len(x)
            if (more := computed_rows(rows) - rows) > 0:
                x = functional.pad(x, (0, 0, 0, more))
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self.bias, "none", [], ""
            )
            return y[:rows]
        return functional.linear(x, self._weight, self.bias)


class PackedLora:
    """An adapter's matrices at one layer, y += B (A x); products have at least `min_rows`.

    Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021.
    """

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


def rows_are_invariant(linear: Linear, min_rows: int, dtype: torch.dtype = torch.float32) -> bool:
    """Try whether a row has the same bits in batches of `min_rows` rows and more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, linear.in_features, generator=generator).to(linear.device, dtype)
    whole = linear(x)
    sizes = (min_rows, min_rows + 1, 5, 8, 15, 16, 17, 33, 64, 100)
    return all(
        torch.equal(linear(x[start : start + rows]), whole[start : start + rows])
        for rows in sizes
        if rows >= min_rows
        for start in (0, 7)
    )


def fewest_invariant_rows(linear: Linear, dtype: torch.dtype) -> int:
    """Find the fewest rows at which a row's bits do not depend on the others, by trial.

    Raises ValueError where they always do.
    """
    for rows in (1, 2, 4, 16):
        if rows_are_invariant(linear, rows, dtype):
            return rows
    raise ValueError("this machine's matrix library gives a row other bits in other batches")
