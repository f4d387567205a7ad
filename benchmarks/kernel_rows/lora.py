"""Low-rank adapters beside the linear layers of Llama-3.1-8B: what shrink and expand add to the
layer's own product.

`none`: rows without adapters in a step that has some elsewhere; `one`: all rows of one; `eight`: as
many rows of each of eight, side by side as a step has them. The limit is the adapters' matrices,
and y read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.grouped_lora import default_tiles, expand, shrink

__all__ = ["rows"]

SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
TOKENS = (1, 32, 256, 4096)
RANKS = (16, 64)
SLOTS = 8


def _adapters(kind: str, tokens: int) -> torch.Tensor:
    place = torch.arange(tokens)
    made = {"none": place * 0 - 1, "one": place * 0, "eight": place * SLOTS // tokens}[kind]
    return made.to(torch.int32).cuda()


def _calls(shape: str, tokens: int, rank: int, kind: str) -> list[Callable[[], object]]:
    k, widths = SHAPES[shape]
    tiles = default_tiles(tokens, k)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * 0.02

    def call(
        x: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        y: torch.Tensor,
        adapters: torch.Tensor,
    ) -> None:
        expand(
            shrink(x, down, adapters, tiles=tiles),
            up,
            adapters,
            y,
            widths,
            tiles=tiles,
        )

    adapters = _adapters(kind, tokens)
    return [
        partial(
            call,
            random(tokens, k),
            random(SLOTS, len(widths) * rank, k),
            random(SLOTS, sum(widths), rank),
            random(tokens, sum(widths)),
            adapters,
        )
        for _ in range(4)
    ]


def _bytes(shape: str, tokens: int, rank: int, kind: str) -> float:
    k, widths = SHAPES[shape]
    adapters = {"none": 0, "one": 1, "eight": min(SLOTS, tokens)}[kind]
    touched = 0 if kind == "none" else tokens * (k + 2 * sum(widths))
    return 2.0 * (adapters * rank * (len(widths) * k + sum(widths)) + touched)


def rows() -> Iterator[Row]:
    for shape in SHAPES:
        for tokens in TOKENS:
            for rank, kind in (
                *((rank, kind) for rank in RANKS for kind in ("one", "eight")),
                (16, "none"),
            ):
                took = median_us(_calls(shape, tokens, rank, kind))
                yield Row(
                    "lora",
                    f"{shape}, {tokens} tokens, rank {rank}, {kind}",
                    took,
                    _bytes(shape, tokens, rank, kind),
                )
