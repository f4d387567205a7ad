"""What the blocks of a probe hold: a pattern of seed, block and position, the same however the
heads are shared out.

The pattern is that of a whole block, with the KV heads of all ranks; a rank writes and compares its
own heads' part. A piece that is missing, old or in the wrong place does not compare equal. Its
bytes are 0 to 63: finite in every dtype of KV, because masked attention multiplies what is in free
blocks by zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.sharding import kv_heads_of

__all__ = ["ProbePattern", "pattern"]


class ProbePattern:
    """The pattern in one rank's pool."""

    def __init__(self, pool: KVPool, num_kv_heads: int, rank: int = 0, size: int = 1) -> None:
        """`num_kv_heads`: of all ranks."""
        self._pool = pool
        head_words = pool.block_bytes // pool.bytes.shape[1] // 4
        self._first_word = kv_heads_of(num_kv_heads, rank, size)[0] * head_words
        self._block_words = num_kv_heads * head_words

    def fill(self, seed: int, blocks: Sequence[int]) -> None:
        """Returns when the bytes are there."""
        for index, block in enumerate(blocks):
            self._words[block] = self._of(seed, index)
        if self._words.is_cuda:
            torch.cuda.synchronize(self._words.device)

    def holds(self, seed: int, blocks: Sequence[int]) -> bool:
        """Whether it is what these blocks hold."""
        return all(
            torch.equal(self._words[block], self._of(seed, index))
            for index, block in enumerate(blocks)
        )

    @property
    def _words(self) -> torch.Tensor:
        """The pool as int32, [num_blocks, words of a block]."""
        return self._pool.bytes.view(self._pool.num_blocks, -1).view(torch.int32)

    def _of(self, seed: int, index: int) -> torch.Tensor:
        words = self._words
        return pattern(
            seed, index * self._block_words + self._first_word, words.shape[1], words.device
        )


def pattern(seed: int, first_word: int, words: int, device: torch.device) -> torch.Tensor:
    """int32 [words] of the pattern, from its `first_word` on; each byte 0 to 63."""
    first = (seed + first_word) % (1 << 31)
    # A multiplication that wraps, by 2**32 over the golden ratio as int32; its high bits are the
    # good ones.
    mixed = torch.arange(words, dtype=torch.int32, device=device).add_(first).mul_(-1640531535)
    return mixed.bitwise_xor_(mixed >> 15).bitwise_and_(0x3F3F3F3F)
