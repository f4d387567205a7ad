"""Paged prefill attention, Llama-3.1-8B shape: prompts, short ones in company, a chunk behind a
prefix, decodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.paged_prefill import paged_prefill, prefill_tiles

__all__ = ["rows"]

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
# Layers of the pool, used in turn: no call finds its keys in the L2 cache because the call before
# read the same ones.
LAYERS = 4
# (tokens, tokens cached before) of each sequence
WORKS = {
    "1 x 4k": [(4096, 0)],
    "2 x 4k": [(4096, 0)] * 2,
    "1 x 16k": [(16384, 0)],
    "8 x 1k": [(1024, 0)] * 8,
    "16 x 128": [(128, 0)] * 16,
    "2k after 14k": [(2048, 14336)],
    "64 decodes at 1k": [(1, 1023)] * 64,
}


@dataclass
class Step:
    """Device inputs of one work."""

    query: torch.Tensor
    pool: torch.Tensor  # [num_blocks, KV_HEADS, LAYERS, 2, block_size, HEAD_DIM]
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    tiles: torch.Tensor
    out: torch.Tensor
    flop: float

    def calls(self, kernel: Callable[..., object], **options: object) -> list[Callable[[], object]]:
        return [
            lambda layer=layer: kernel(  # type: ignore[misc]
                self.query,
                self.pool[:, :, layer, 0],
                self.pool[:, :, layer, 1],
                self.block_tables,
                self.query_starts,
                self.context_lens,
                self.tiles,
                out=self.out,
                scale=SCALE,
                **options,
            )
            for layer in range(LAYERS)
        ]


def _step(work: str, block_size: int) -> Step:
    lens = [count for count, _ in WORKS[work]]
    contexts = [count + before for count, before in WORKS[work]]
    width = -(-max(contexts) // block_size)
    num_blocks = 1 + width * len(lens)
    device, dtype = torch.device("cuda"), torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    tiles = prefill_tiles(lens, contexts, group=HEADS // KV_HEADS)
    visible = sum(n * before + n * (n + 1) // 2 for n, before in WORKS[work])
    shape = (num_blocks, KV_HEADS, LAYERS, 2, block_size, HEAD_DIM)
    query = torch.randn(sum(lens), HEADS, HEAD_DIM, dtype=dtype, device=device, generator=generator)
    return Step(
        query=query,
        pool=torch.randn(shape, dtype=dtype, device=device, generator=generator),
        block_tables=order.view(len(lens), width).int(),
        query_starts=torch.tensor(
            np.concatenate([[0], np.cumsum(lens)]), dtype=torch.int32, device=device
        ),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        tiles=torch.from_numpy(tiles).to(device),
        out=torch.empty_like(query),
        flop=4.0 * HEADS * HEAD_DIM * visible,
    )


def _work_name(work: str, block_size: int) -> str:
    return f"{work}, H{HEADS}/{KV_HEADS} D{HEAD_DIM} bf16, block {block_size}"


def rows() -> Iterator[Row]:
    for work, block_size in itertools.product(WORKS, (16, 64)):
        step = _step(work, block_size)
        us = median_us(step.calls(paged_prefill))
        yield Row("paged_prefill", _work_name(work, block_size), us, flop=step.flop)
