"""Copy scattered blocks of one pool into another: how a GPU reads KV out of a peer's memory.

One contiguous range of each block is copied in tiles: all, or the heads that two ranks share. A
launch copies a *slice* of a transfer, with at most PROGRAMS programs, to leave decodes the rest of
the GPU. Pools are addresses: this process may not see the peer's GPU.
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
    "tiles_in",
]

VECTOR_BYTES = 16
# 64 are 1 MiB under way; NVLink holds 0.6 MB (400 GB/s for about 1.5 us).
TILE_BYTES = 16 << 10
PROGRAMS = 64
_WARPS = 8
_WORD_BYTES = 4


def tiles_in(num_blocks: int, block_bytes: int) -> int:
    return num_blocks * -(-block_bytes // TILE_BYTES)


@triton.jit(
    do_not_specialize=["first_tile", "end_tile", "block_vectors", "source_stride", "target_stride"],
    do_not_specialize_on_alignment=["source_blocks", "target_blocks"],
)
def _gather(
    source,  # addresses of the two pools
    target,
    source_blocks,  # int32 [blocks]
    target_blocks,
    first_tile,
    end_tile,
    # in units of 4 words
    block_vectors,
    source_stride,
    target_stride,
    TILE_WORDS: tl.constexpr,
):
    # grid: (min(PROGRAMS, tiles),); program p copies tiles first_tile + p, + p + programs, ...
    block_words = block_vectors * 4
    tiles_per_block = (block_words + TILE_WORDS - 1) // TILE_WORDS
    words = tl.arange(0, TILE_WORDS)
    for tile in range(first_tile + tl.program_id(0), end_tile, tl.num_programs(0)):
        pair = tile // tiles_per_block
        word = (tile % tiles_per_block) * TILE_WORDS + words
        read = tl.load(source_blocks + pair).to(tl.int64) * source_stride * 4
        write = tl.load(target_blocks + pair).to(tl.int64) * target_stride * 4
        origin = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16) + tl.multiple_of(read, 4)
        destination = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16) + tl.multiple_of(
            write, 4
        )
        # Past L1, which knows nothing of a peer's writes.
        values = tl.load(origin + word, mask=word < block_words, cache_modifier=".cg", other=0)
        tl.store(destination + word, values, mask=word < block_words, eviction_policy="evict_first")


def gather_blocks(
    source: int,
    target: int,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    *,
    block_bytes: int,
    tiles: range,
    source_stride: int,
    target_stride: int,
    programs: int = PROGRAMS,
) -> None:
    """Copy `tiles` of the transfer from source_blocks[i] to target_blocks[i] of two pools.

    `source`, `target`: addresses in the first blocks; `block_bytes` are copied of each; strides
    lead to the next block. All are multiples of 16. Block ids int32 [blocks], on the GPU.
    """
    numbers = (block_bytes, source, target, source_stride, target_stride)
    assert not any(number % VECTOR_BYTES for number in numbers)
    assert source_blocks.dtype == target_blocks.dtype == torch.int32
    assert tiles.stop <= tiles_in(source_blocks.numel(), block_bytes)
    if not tiles:
        return
    _gather[(min(programs, len(tiles)),)](
        source,
        target,
        source_blocks,
        target_blocks,
        tiles.start,
        tiles.stop,
        block_bytes // VECTOR_BYTES,
        source_stride // VECTOR_BYTES,
        target_stride // VECTOR_BYTES,
        TILE_WORDS=TILE_BYTES // _WORD_BYTES,
        num_warps=_WARPS,
    )
