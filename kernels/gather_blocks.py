"""Copy scattered blocks into packed memory, or back: KV on its way through NCCL.

One contiguous range of each block is copied in tiles: all, or the heads that two ranks share. At
most PROGRAMS programs leave decodes the rest of the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.uploads import copy_words

__all__ = [
    "PROGRAMS",
    "TILE_BYTES",
    "VECTOR_BYTES",
    "copy_words",
    "gather_blocks",
]

VECTOR_BYTES = 16
TILE_BYTES = 16 << 10
PROGRAMS = 128
_WARPS = 8
_WORD_BYTES = 4


@triton.jit(
    do_not_specialize=["tiles", "block_vectors", "source_stride", "target_stride"],
    do_not_specialize_on_alignment=["source_blocks", "target_blocks"],
)
def _gather(
    source,  # addresses of both
    target,
    source_blocks,  # int32 [blocks]
    target_blocks,
    tiles,
    # in units of 4 words
    block_vectors,
    source_stride,
    target_stride,
    TILE_WORDS: tl.constexpr,
):
    # grid: (min(PROGRAMS, tiles),); program p copies tiles p, p + programs, ...
    block_words = block_vectors * 4
    tiles_per_block = (block_words + TILE_WORDS - 1) // TILE_WORDS
    words = tl.arange(0, TILE_WORDS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        pair = tile // tiles_per_block
        word = (tile % tiles_per_block) * TILE_WORDS + words
        read = tl.load(source_blocks + pair).to(tl.int64) * source_stride * 4
        write = tl.load(target_blocks + pair).to(tl.int64) * target_stride * 4
        origin = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16) + tl.multiple_of(read, 4)
        destination = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16) + tl.multiple_of(
            write, 4
        )
        values = tl.load(origin + word, mask=word < block_words, cache_modifier=".cg", other=0)
        tl.store(destination + word, values, mask=word < block_words, eviction_policy="evict_first")


def gather_blocks(
    source: int,
    target: int,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    *,
    block_bytes: int,
    source_stride: int,
    target_stride: int,
) -> None:
    """Copy from source_blocks[i] to target_blocks[i] of two pools.

    `source`, `target`: addresses in the first blocks; `block_bytes` are copied of each; strides
    lead to the next block. All are multiples of 16. Block ids int32 [blocks], on the GPU.
    """
    numbers = (block_bytes, source, target, source_stride, target_stride)
    assert not any(number % VECTOR_BYTES for number in numbers)
    assert source_blocks.dtype == target_blocks.dtype == torch.int32
    tiles = source_blocks.numel() * -(-block_bytes // TILE_BYTES)
    _gather[(min(PROGRAMS, tiles),)](
        source,
        target,
        source_blocks,
        target_blocks,
        tiles,
        block_bytes // VECTOR_BYTES,
        source_stride // VECTOR_BYTES,
        target_stride // VECTOR_BYTES,
        TILE_WORDS=TILE_BYTES // _WORD_BYTES,
        num_warps=_WARPS,
    )
