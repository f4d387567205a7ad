"""The mixture of experts of Mixtral-8x7B and of Qwen3-30B-A3B.

Random routing: every expert is as likely as another. The limit is the weights of the experts that
are hit, read once, or from 4,096 tokens on the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.grouped_gemm import (
    moe,
)

__all__ = ["rows"]

TOKENS = (1, 32, 256, 4096)
BF16 = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model's experts."""

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = (Shape("Mixtral", 4096, 14336, 8, 2), Shape("Qwen3-30B", 2048, 768, 128, 8))


def _layers(shape: Shape) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def random(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(shape.experts, rows, columns, device="cuda", dtype=torch.bfloat16)
        return weight.mul_(columns**-0.5)

    return [
        (random(2 * shape.inner, shape.hidden), random(shape.hidden, shape.inner)) for _ in range(2)
    ]


def _limits(shape: Shape, logits: list[torch.Tensor]) -> tuple[float, float]:
    tokens, each = len(logits[0]), 3 * shape.hidden * shape.inner
    if tokens >= 4096:
        return 0.0, 2.0 * tokens * shape.top_k * each
    hit = [len(set(one.topk(shape.top_k).indices.flatten().tolist())) for one in logits]
    return sum(hit) / len(hit) * each * BF16, 0.0


def rows() -> Iterator[Row]:
    """Yield a row for each model and number of tokens, with the shipped tile shapes."""
    for shape in SHAPES:
        layers = _layers(shape)
        for tokens in TOKENS:
            count = 8 if tokens <= 32 else 2  # inputs, so that each call hits other experts
            xs, logits = (
                [
                    torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
                    for _ in range(count)
                ]
                for columns in (shape.hidden, shape.experts)
            )
            out = torch.empty_like(xs[0])
            calls = [
                partial(
                    moe,
                    xs[at],
                    logits[at],
                    *layers[at % 2],
                    top_k=shape.top_k,
                    renormalize=True,
                    out=out,
                )
                for at in range(count)
            ]
            work = f"{shape.name}, {tokens} tokens, bf16"
            yield Row("moe", work, median_us(calls), *_limits(shape, logits))
        del layers
        torch.cuda.empty_cache()
