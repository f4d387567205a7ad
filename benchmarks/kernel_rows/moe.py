"""The mixture of experts of Mixtral-8x7B and of Qwen3-30B-A3B: the whole of it, and its two grouped
products.

Random routing: every expert is as likely as another. The limit is the weights of the experts that
are hit, read once, or from 4,096 tokens on the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    gate_up: torch.Tensor
    down: torch.Tensor


def _layers(shape: Shape) -> list[Layer]:
    """Two layers' worth; together far larger than the L2 cache."""

    def random(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(shape.experts, rows, columns, device="cuda", dtype=torch.bfloat16)
        return weight.mul_(columns**-0.5)

    return [
        Layer(random(2 * shape.inner, shape.hidden), random(shape.hidden, shape.inner))
        for _ in range(2)
    ]


@dataclass(frozen=True, slots=True)
class Input:
    """One step's rows; several of them, so that each call hits other experts."""

    x: torch.Tensor
    logits: torch.Tensor
    layer: Layer


def _inputs(shape: Shape, tokens: int, layers: list[Layer]) -> list[Input]:
    count = 8 if tokens <= 32 else 2

    def random(columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)

    return [Input(random(shape.hidden), random(shape.experts), layers[i % 2]) for i in range(count)]


def _limits(shape: Shape, inputs: list[Input], matrices: int) -> tuple[float, float]:
    """Bytes, operations of a call over `matrices` (of gate, up, down) of the experts that are hit;
    what limits it.
    """
    tokens = len(inputs[0].x)
    each = shape.hidden * shape.inner * matrices
    if tokens >= 4096:
        return 0.0, 2.0 * tokens * shape.top_k * each
    hit = sum(
        len(set(one.logits.topk(shape.top_k).indices.flatten().tolist())) for one in inputs
    ) / len(inputs)
    return hit * each * BF16, 0.0


def rows() -> Iterator[Row]:
    """The table, with the shipped tile shapes."""
    for shape in SHAPES:
        layers = _layers(shape)
        for tokens in TOKENS:
            inputs = _inputs(shape, tokens, layers)
            out = torch.empty_like(inputs[0].x)
            calls = [_whole(shape, one, out) for one in inputs]
            yield Row("moe", _work(shape, tokens), median_us(calls), *_limits(shape, inputs, 3))
        del layers
        torch.cuda.empty_cache()


def _work(shape: Shape, tokens: int) -> str:
    return f"{shape.name}, {tokens} tokens, bf16"


def _whole(shape: Shape, one: Input, out: torch.Tensor) -> Callable[[], object]:
    return lambda: moe(
        one.x,
        one.logits,
        one.layer.gate_up,
        one.layer.down,
        top_k=shape.top_k,
        renormalize=True,
        out=out,
        pdl=True,
    )
