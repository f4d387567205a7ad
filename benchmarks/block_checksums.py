"""What a CPU needs for the checksums of KV blocks (`--kv-checksums`): `python -m
benchmarks.block_checksums`.

Blocks of three models, drawn at random from a pool that no cache holds. Seconds are the thread's
own CPU time, so that work beside it changes little. A GPU's are in `python -m benchmarks.kernels
block_checksums`, and what both cost in a hand-over in `python -m benchmarks.transfer --checksums
0.01,1`. GB of 1e9 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kvrelay.kernels.block_checksums import WORD_BYTES, block_checksums, keys

SHAPES = {
    "SmolLM2-135M fp32, 16 tokens": (3, 737_280),
    "Llama-3.1-8B bf16, 16 tokens": (8, 2 << 20),
    "Llama-3.1-8B bf16, 64 tokens": (8, 8 << 20),
}
"""KV heads, and bytes of a block."""
POOL_BYTES, ROUNDS = 256 << 20, 5


def rows() -> Iterator[str]:
    """A line per shape: the median of some rounds over a quarter of the pool."""
    rng = np.random.default_rng(0)
    for name, (kv_heads, block_bytes) in SHAPES.items():
        words = block_bytes // kv_heads // WORD_BYTES
        pool = rng.integers(
            -(1 << 63), (1 << 63) - 1, size=(POOL_BYTES // block_bytes, kv_heads, words)
        )
        places, times = keys(words), []
        for _ in range(ROUNDS):
            blocks = rng.permutation(len(pool))[: max(1, len(pool) // 4)].tolist()
            began = time.thread_time()
            block_checksums(pool, blocks, places)
            times.append((time.thread_time() - began) / len(blocks))
        median = sorted(times)[ROUNDS // 2]
        yield (
            f"{name:<32}{block_bytes:>9} B{median * 1e6:9.0f} us a "
            f"block{block_bytes / median / 1e9:7.2f} GB/s"
        )


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
