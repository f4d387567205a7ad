"""Gathering the blocks of a transfer, 512 MiB, from one pool into another on the same GPU.

More than NVLink brings (0.4 TB/s each way) is enough, and what is beyond that is taken from the
decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.gather_blocks import PROGRAMS, gather_blocks

__all__ = ["rows"]

TRANSFER_BYTES = 512 << 20
POOL_BYTES = 4 << 30
BLOCKS = {"64 KiB": 64 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20}


def rows() -> Iterator[Row]:
    """Blocks of one layer, of 16 tokens of Llama-3.1-8B, and of 64."""
    pools = _pools()
    for name in BLOCKS:
        yield _measure(pools, name)


def _pools() -> tuple[torch.Tensor, torch.Tensor]:
    source, target = (torch.zeros(POOL_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return source, target


def _measure(pools: tuple[torch.Tensor, torch.Tensor], name: str) -> Row:
    block_bytes = BLOCKS[name]
    count = TRANSFER_BYTES // block_bytes
    calls = []
    for _ in range(2):
        source, target = (
            torch.randperm(POOL_BYTES // block_bytes, device="cuda")[:count].to(torch.int32)
            for _ in range(2)
        )
        calls.append(
            partial(
                gather_blocks,
                pools[0].data_ptr(),
                pools[1].data_ptr(),
                source,
                target,
                block_bytes=block_bytes,
                source_stride=block_bytes,
                target_stride=block_bytes,
            )
        )
    work = f"{count} blocks of {name}, {PROGRAMS} programs"
    return Row("gather_blocks", work, median_us(calls), bytes_moved=2.0 * TRANSFER_BYTES)
