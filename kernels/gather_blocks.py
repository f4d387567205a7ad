"""Blocks from one pool into another, scattered on both sides: how a GPU reads KV out of a peer's
mapped memory.

What is copied of a block is one contiguous range: all of it, or the heads that two ranks have in
common, where the pools' blocks are larger and of different sizes. The kernel runs on the reading
GPU. These ranges are cut into tiles of `TILE_BYTES`, and a launch copies a range of tiles: one
launch is one *slice* of a transfer. At most `PROGRAMS` programs run, so that the decodes that share
the GPU keep the rest of it. The source is an address, not a tensor: the peer's GPU may be one that
this process does not see otherwise.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "PROGRAMS",
    "TILE_BYTES",
    "VECTOR_BYTES",
    "gather_blocks",
    "gather_blocks_reference",
    "tiles_in",
]

VECTOR_BYTES = 16  # one load of a thread; blocks are a multiple of it
# A program has one tile under way: 64 of them are 1 MiB, and NVLink holds 0.6 MB (400 GB/s for
# about 1.5 us).
TILE_BYTES = 16 << 10
PROGRAMS = 64
_WARPS = 8
_WORD_BYTES = 4


def tiles_in(num_blocks: int, block_bytes: int) -> int:
    """Tiles of that many blocks, the unit of a slice."""
    return num_blocks * -(-block_bytes // TILE_BYTES)


# One binary for all slices of all transfers between all layouts.
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
    # to copy of each, in units of 4 words, so that the compiler sees what they are multiples of
    block_vectors,
    source_stride,  # from a block to the next, in the same units
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
        # Past L1, which knows nothing of a peer's writes. (PTX has no ".cg" that is also evicted
        # first.)
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
    source_stride: int | None = None,
    target_stride: int | None = None,
    programs: int = PROGRAMS,
    tile_bytes: int = TILE_BYTES,
) -> None:
    """Copy `tiles` of the transfer that writes block source_blocks[i] of one pool to block
    target_blocks[i] of another.

    `source`, `target`: addresses of what is copied of the pools' first blocks; `block_bytes` are
    copied of each, and the strides lead to the next block (None: as many). All are multiples of 16.
    Block ids int32 [blocks], on the GPU.
    """
    strides = source_stride or block_bytes, target_stride or block_bytes
    assert not any(number % VECTOR_BYTES for number in (block_bytes, source, target, *strides))
    assert source_blocks.dtype == target_blocks.dtype == torch.int32
    assert tiles.stop <= source_blocks.numel() * -(-block_bytes // tile_bytes)
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
        strides[0] // VECTOR_BYTES,
        strides[1] // VECTOR_BYTES,
        TILE_WORDS=tile_bytes // _WORD_BYTES,
        num_warps=_WARPS,
    )


def gather_blocks_reference(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """The same over tensors: pools uint8 [blocks, block_bytes], the whole transfer."""
    target[target_blocks.long()] = source[source_blocks.long()]
