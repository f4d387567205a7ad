"""KV memory of a simulated node: blocks that requests use, private tokens, and a prefix cache of what nobody uses.

As paged_engine/blocks.py, without block numbers: what is unused stays findable until its room is wanted, the one that
was used longest ago first, and of one prompt its end before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockCache"]


class BlockCache:
    """`block_tokens` is the size of named blocks; counts are tokens."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.private = 0
        self.stored: list[int] = []
        self.removed: list[int] = []
        self._used: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Tokens for which room can be made."""
        return self.capacity - self.private - len(self._used) * self.block_tokens

    def cached(self, blocks: Sequence[int]) -> int:
        """How many tokens of these blocks, from the first on, are here."""
        used, unused = self._used, self._unused
        count = 0
        for block in blocks:
            if block not in used and block not in unused:
                break
            count += 1
        return count * self.block_tokens

    def room_for(self, blocks: Sequence[int], private: int) -> bool:
        """Whether these blocks and so many other tokens would fit now."""
        fresh = sum(block not in self._used for block in blocks)
        return fresh * self.block_tokens + private <= self.free

    def take(self, blocks: Sequence[int], private: int) -> None:
        """Use these blocks, computed or to be computed, and so many tokens that have no name."""
        used, unused = self._used, self._unused
        for block in blocks:
            count = used.get(block)
            if count is not None:
                used[block] = count + 1
                continue
            used[block] = 1
            if block in unused:
                del unused[block]
            else:
                self.stored.append(block)
        self.private += private
        self.shrink()

    def give_back(self, blocks: Sequence[int], private: int) -> None:
        """Use them no more."""
        used, unused = self._used, self._unused
        for block in reversed(blocks):
            if used[block] > 1:
                used[block] -= 1
            else:
                del used[block]
                unused[block] = None
        self.private -= private

    def shrink(self) -> None:
        """Let unused blocks go until all that is used fits."""
        most = max(0, self.free) // self.block_tokens
        while len(self._unused) > most:
            self.removed.append(self._unused.popitem(last=False)[0])

    def news(self) -> tuple[list[int], list[int]]:
        """What was stored and removed since the last time."""
        news = self.stored, self.removed
        if news[0] or news[1]:
            self.stored, self.removed = [], []
        return news
