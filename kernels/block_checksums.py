"""Checksums of KV blocks on a CPU, and their definition; GPU: `kernels/gpu_checksums.py`.

Each KV head's slice of a block has one of 64 bits: the sum over its words w of key(i) * (w + (w >>
32)), modulo 2**64, i being the word's place and >> keeping the sign. Keys are odd and differ: one
wrong word is noticed, unless its halves swap 0x7FFFFFFF and b for 0x80000000 and b - 1, or the
reverse; several but for a chance of 2**-32. This finds faults, not forgery.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["CHECKSUM_BYTES", "STRIDE", "VECTOR_BYTES", "WORD_BYTES", "block_checksums"]

CHECKSUM_BYTES = WORD_BYTES = 8
VECTOR_BYTES = 16  # that a GPU reads at a time
# 2**64 over the golden ratio, odd, as int64: its multiples are spread evenly.
STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


@lru_cache(maxsize=4)
def _keys(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    multiples = np.arange(1, count + 1, dtype=np.int64) * np.int64(STRIDE)
    return (multiples ^ (multiples >> 32)) | 1


def block_checksums(block: bytes | memoryview, kv_heads: int) -> bytes:
    """Return a block's checksums, head by head. Each head has whole words. Lets go of the GIL."""
    words = np.frombuffer(block, np.int64).reshape(kv_heads, -1)
    places = _keys(words.shape[1])
    return b"".join(np.dot(each + (each >> 32), places).tobytes() for each in words)
