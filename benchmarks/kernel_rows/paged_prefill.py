"""Paged prefill attention, Llama-3.1-8B shape: prompts, short ones in company, a chunk behind a
prefix, decodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.paged_prefill import paged_prefill, prefill_tiles

__all__ = ["rows"]

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
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


def rows() -> Iterator[Row]:
    for work, block_size in itertools.product(WORKS, (16, 64)):
        lens = [count for count, _ in WORKS[work]]
        contexts = [count + before for count, before in WORKS[work]]
        visible = sum(n * before + n * (n + 1) // 2 for n, before in WORKS[work])
        name = f"{work}, H{HEADS}/{KV_HEADS} D{HEAD_DIM} bf16, block {block_size}"
        us = median_us(_calls(lens, contexts, block_size))
        yield Row("paged_prefill", name, us, flop=4.0 * HEADS * HEAD_DIM * visible)


def _calls(lens: list[int], contexts: list[int], block_size: int) -> list[Callable[[], object]]:
    width = -(-max(contexts) // block_size)
    num_blocks = 1 + width * len(lens)
    random: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    pool = torch.randn(num_blocks, KV_HEADS, LAYERS, 2, block_size, HEAD_DIM, **random)
    query = torch.randn(sum(lens), HEADS, HEAD_DIM, **random)
    tables = (torch.randperm(num_blocks - 1) + 1).view(len(lens), width)
    tiles = torch.from_numpy(prefill_tiles(lens, contexts, group=HEADS // KV_HEADS))
    indices = (tables, torch.tensor([0, *accumulate(lens)]), torch.tensor(contexts), tiles)
    step = [each.to("cuda", torch.int32) for each in indices]
    out = torch.empty_like(query)
    return [
        partial(
            paged_prefill,
            *(query, pool[:, :, layer, 0], pool[:, :, layer, 1], *step),
            out=out,
            scale=HEAD_DIM**-0.5,
        )
        for layer in range(LAYERS)
    ]
