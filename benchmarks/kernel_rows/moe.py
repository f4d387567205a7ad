"""The mixture of experts of Mixtral-8x7B and of Qwen3-30B-A3B: the whole of it, and its two grouped
products.

Random routing: every expert is as likely as another. The limit is the weights of the experts that
are hit, read once, or from 4,096 tokens on the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from triton.errors import TritonError

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.grouped_gemm import (
    SortedPlaces,
    Tiling,
    _product,
    _sort_by_expert,
    _tilings,
    moe,
)

__all__ = ["rows", "sweep"]

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


# Tile shapes tried, by rows of a tile: gate-up's, then down's.
_SMALL = [
    Tiling(*t)
    for t in ((32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (16, 256, 4, 4), (64, 128, 8, 5))
]
_SMALL_DOWN = [
    Tiling(*t) for t in ((64, 128, 4, 4), (32, 256, 4, 3), (32, 128, 4, 4), (16, 256, 4, 4))
]
_LARGE = [Tiling(128, 64, 8, 4, True), Tiling(128, 64, 8, 4), Tiling(128, 64, 8, 3, True)]
_LARGE_DOWN = [Tiling(256, 64, 8, 4, True), Tiling(256, 64, 8, 4), Tiling(128, 64, 8, 4, True)]
CANDIDATES: dict[int, tuple[list[Tiling], list[Tiling]]] = {
    16: (_SMALL, _SMALL_DOWN),
    32: (_SMALL[:3], _SMALL_DOWN[:2]),
    64: (
        [Tiling(64, 64, 4, 4, True), Tiling(64, 64, 4, 4), Tiling(128, 64, 8, 4, True)],
        [Tiling(128, 64, 4, 4, True)],
    ),
    128: (_LARGE, _LARGE_DOWN),
}
ROWS_TRIED = {1: (16,), 32: (16, 32), 256: (16, 32, 64, 128), 4096: (64, 128)}


def sweep() -> Iterator[Row]:
    """Each grouped product alone, and routing with sorting, under many tile shapes."""
    for shape in SHAPES:
        layers = _layers(shape)
        for tokens in TOKENS:
            inputs = _inputs(shape, tokens, layers)
            shipped = _tilings(tokens * shape.top_k, shape.experts, inputs[0].x.device)[0]
            calls = [_sorting(shape, one, shipped) for one in inputs]
            yield Row(
                "moe route and sort",
                _work(shape, tokens),
                median_us(calls),
                config=f"rows {shipped}",
            )
            for tile_rows in ROWS_TRIED[tokens]:
                yield from _products(shape, inputs, tile_rows)
        del layers, inputs, calls
        torch.cuda.empty_cache()


def _sorting(shape: Shape, one: Input, tile_rows: int) -> Callable[[], object]:
    return lambda: _sort_by_expert(one.logits, shape.top_k, True, tile_rows, True)


def _products(shape: Shape, inputs: list[Input], tile_rows: int) -> Iterator[Row]:
    tokens = len(inputs[0].x)
    gated = torch.randn(tokens * shape.top_k, shape.inner, device="cuda", dtype=torch.bfloat16)
    results = torch.empty(tokens * shape.top_k, shape.hidden, device="cuda", dtype=torch.bfloat16)
    places = [_sort_by_expert(one.logits, shape.top_k, True, tile_rows, False)[1] for one in inputs]

    def gate_up(one: Input, mine: SortedPlaces, tiling: Tiling) -> None:
        _product(
            one.x,
            one.layer.gate_up,
            gated,
            mine,
            tile_rows,
            tiling,
            places_per_row=shape.top_k,
            act="silu",
            pdl=False,
        )

    def down(one: Input, mine: SortedPlaces, tiling: Tiling) -> None:
        _product(
            gated,
            one.layer.down,
            results,
            mine,
            tile_rows,
            tiling,
            places_per_row=1,
            act=None,
            pdl=False,
        )

    for product, matrices, tilings in zip(
        (gate_up, down), (2, 1), CANDIDATES[tile_rows], strict=True
    ):
        for tiling in tilings:
            calls = [
                partial(product, one, mine, tiling)
                for one, mine in zip(inputs, places, strict=True)
            ]
            config = f"rows {tile_rows}, {tiling}"
            try:
                took = median_us(calls)
            except TritonError as why:
                print(f"moe {product.__name__} {config}: {why}")
                continue
            moved, flop = _limits(shape, inputs, matrices)
            yield Row(f"moe {product.__name__}", _work(shape, tokens), took, moved, flop, config)
