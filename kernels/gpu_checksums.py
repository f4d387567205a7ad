"""Checksums of KV blocks on a GPU, as `kernels/block_checksums.py` defines them.

Grid: at most PROGRAMS programs, to leave steps the rest of the GPU. An item is a piece of a block's
slice; torch adds up a slice's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.block_checksums import STRIDE, VECTOR_BYTES, WORD_BYTES

__all__ = ["gpu_block_checksums"]

PIECE_BYTES = 128 << 10
_PIECE_WORDS = tl.constexpr(PIECE_BYTES // WORD_BYTES)
_TILE_WORDS = tl.constexpr(2048)
PROGRAMS = 128
_STRIDE = tl.constexpr(STRIDE)


@triton.jit(
    do_not_specialize=["items", "kv_heads", "slice_vectors", "pieces"],
    do_not_specialize_on_alignment=["blocks"],
)
def _checksums(
    pool,
    blocks,
    sums,
    items,
    kv_heads,
    slice_vectors,
    pieces,
):
    slice_words = slice_vectors * 2
    lanes = tl.arange(0, _TILE_WORDS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        part = item // pieces
        block = tl.load(blocks + part // kv_heads).to(tl.int64)
        start = (block * kv_heads + part % kv_heads) * slice_vectors * 2
        origin = tl.multiple_of(pool.to(tl.pointer_type(tl.int64)), 16) + tl.multiple_of(start, 2)
        first = (item % pieces) * _PIECE_WORDS
        total = tl.zeros([_TILE_WORDS], dtype=tl.int64)
        for tile in range(0, _PIECE_WORDS, _TILE_WORDS):
            place = first + tile + lanes
            # Past L1: another device wrote.
            word = tl.load(origin + place, mask=place < slice_words, cache_modifier=".cg", other=0)
            key = (place.to(tl.int64) + 1) * _STRIDE
            key = (key ^ (key >> 32)) | 1
            total += (word + (word >> 32)) * key
        tl.store(sums + item, tl.sum(total, 0))


def gpu_block_checksums(
    pool: int, blocks: torch.Tensor, kv_heads: int, slice_bytes: int
) -> torch.Tensor:
    """Return int64 [blocks, kv_heads] of these blocks, int32 on the GPU, of the pool at an address.

    `slice_bytes` and the address are multiples of VECTOR_BYTES.
    """
    pieces = -(-slice_bytes // PIECE_BYTES)
    items = blocks.numel() * kv_heads * pieces
    sums = torch.empty(items, dtype=torch.int64, device=blocks.device)
    if items:
        _checksums[(min(PROGRAMS, items),)](
            *(pool, blocks, sums, items, kv_heads, slice_bytes // VECTOR_BYTES, pieces),
            num_warps=8,
        )
    return sums.view(blocks.numel(), kv_heads, pieces).sum(2)
