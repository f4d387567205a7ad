"""Checksums of KV blocks on a CPU, and their definition; GPU: `kernels/gpu_checksums.py`.

Each KV head's slice of a block has one of 64 bits: the sum over its words w of key(i) * (w + (w >>
32)), modulo 2**64, i being the word's place and >> keeping the sign. Keys are odd and differ: one
wrong word is noticed, unless its halves swap 0x7FFFFFFF and b for 0x80000000 and b - 1, or the
reverse; several but for a chance of 2**-32. This finds faults, not forgery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["STRIDE", "WORD_BYTES", "block_checksums", "keys"]

WORD_BYTES = 8
# 2**64 over the golden ratio, odd, as int64: its multiples are spread evenly.
STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)

Words = np.ndarray[Any, np.dtype[np.int64]]


def keys(count: int) -> Words:
    multiples = np.arange(1, count + 1, dtype=np.int64) * np.int64(STRIDE)
    return (multiples ^ (multiples >> 32)) | 1


def block_checksums(pool: Words, blocks: Sequence[int], places: Words) -> Words:
    """Return int64 [blocks, kv_heads] of pool [num_blocks, kv_heads, words]; `places`: `keys`.

    Lets go of the GIL.
    """
    sums = [[np.dot(each + (each >> 32), places) for each in pool[block]] for block in blocks]
    return np.array(sums, dtype=np.int64).reshape(-1, pool.shape[1])
