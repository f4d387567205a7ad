"""Checksums of blocks of Llama-3.1-8B (8 KV heads, blocks of 64 tokens): of one, as a sample has
it, and of many.

The limit is memory: each byte is read once. The bounded number of programs must read faster than a
link brings KV (0.4 TB/s); what is beyond that is taken from the steps beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.gpu_checksums import PROGRAMS, gpu_block_checksums

__all__ = ["rows", "sweep"]

KV_HEADS, BLOCK_BYTES = 8, 8 << 20
POOL_BYTES = 4 << 30
COUNTS = (1, 4, 16, 64)


def rows() -> Iterator[Row]:
    """As the thread of checksums launches it."""
    pool = _pool()
    for count in COUNTS:
        yield _measure(pool, count)


def sweep() -> Iterator[Row]:
    """How many programs."""
    pool = _pool()
    for count in COUNTS:
        for programs in (16, 32, PROGRAMS, 132, 264):
            yield _measure(pool, count, programs, f"{programs} programs")


def _pool() -> torch.Tensor:
    return torch.zeros(POOL_BYTES, dtype=torch.uint8, device="cuda")


def _measure(pool: torch.Tensor, count: int, programs: int = PROGRAMS, config: str = "") -> Row:
    order = torch.randperm(POOL_BYTES // BLOCK_BYTES, device="cuda").to(torch.int32)
    calls = [
        partial(
            gpu_block_checksums,
            pool.data_ptr(),
            order[first : first + count].clone(),
            kv_heads=KV_HEADS,
            slice_bytes=BLOCK_BYTES // KV_HEADS,
            programs=programs,
        )
        for first in range(0, min(8, order.numel() // count) * count, count)
    ]
    work = f"{count} blocks of 8 MiB"
    return Row(
        "block_checksums",
        work,
        median_us(calls),
        bytes_moved=float(count * BLOCK_BYTES),
        config=config,
    )
