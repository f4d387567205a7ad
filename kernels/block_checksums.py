"""Checksums of KV blocks on a CPU, and their definition: the twin of kernels/gpu_checksums.py.

Each KV head's slice of a block (all layers, keys and values, one contiguous piece) has a checksum
of 64 bits: the sum over its 64-bit words w of key(i) * (w + (w >> 32)), modulo 2**64, i being the
word's place in the slice and >> keeping the sign. Sums that wrap do not depend on their order, so
every device finds the same. Keys are odd and differ, so a single wrong word is noticed, unless its
halves were 0x7FFFFFFF and b and are 0x80000000 and b - 1 now, or the other way around. Words that
are swapped, shifted or wrong together are noticed but for a chance of about 2**-32. Keys are no
secret: this finds faults, not forgery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["STRIDE", "WORD_BYTES", "block_checksums", "keys"]

WORD_BYTES = 8
STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio, odd, as int64: its multiples are spread evenly."""

Words = np.ndarray[Any, np.dtype[np.int64]]


def keys(count: int) -> Words:
    """Return the keys of the first `count` places, int64."""
    multiples = np.arange(1, count + 1, dtype=np.int64) * np.int64(STRIDE)
    return (multiples ^ (multiples >> 32)) | 1


def block_checksums(pool: Words, blocks: Sequence[int], places: Words) -> Words:
    """Return the checksums of these blocks, int64 [blocks, kv_heads].

    `pool`: int64 [num_blocks, kv_heads, words of a slice]; `places`: `keys` of as many words. numpy
    lets go of the GIL for a whole slice and takes one core.
    """
    sums = np.empty((len(blocks), pool.shape[1]), dtype=np.int64)
    folded = np.empty(pool.shape[2], dtype=np.int64)
    for row, block in enumerate(blocks):
        for head, words in enumerate(pool[block]):
            np.right_shift(words, 32, out=folded)
            np.add(folded, words, out=folded)
            sums[row, head] = np.dot(folded, places)
    return sums
