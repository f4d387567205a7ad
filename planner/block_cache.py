"""KV memory of a simulated node: blocks that requests use, private tokens, and a prefix cache of
what nobody uses.

As paged_engine/blocks.py, without block numbers: a block is findable as soon as its KV is there,
and when it is unused until its room is wanted, the one that was used longest ago first, and of one
prompt its end before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockCache"]


class BlockCache:
    """`block_size` is the size of named blocks; counts are tokens."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.private = 0
        self.stored: list[int] = []
        self.removed: list[int] = []
        self._used: dict[int, int] = {}
        self._coming: set[int] = set()
        """Of those in use, whose KV is not there yet: each has one user."""
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Tokens for which room can be made."""
        return self.capacity - self.private - len(self._used) * self.block_size

    def cached(self, blocks: Sequence[int]) -> int:
        """How many tokens of these blocks, from the first on, are here."""
        return self._found(blocks) * self.block_size

    def _found(self, blocks: Sequence[int]) -> int:
        used, unused, coming = self._used, self._unused, self._coming
        count = 0
        for block in blocks:
            if (block not in used and block not in unused) or block in coming:
                break
            count += 1
        return count

    def room_for(self, blocks: Sequence[int], private: int) -> bool:
        """Whether these blocks and so many other tokens would fit now."""
        shared = sum(block in self._used for block in blocks[: self._found(blocks)])
        return (len(blocks) - shared) * self.block_size + private <= self.free

    def take(self, blocks: Sequence[int], private: int) -> tuple[int, ...]:
        """Use these blocks and so many tokens that have no name. The blocks that have one from now
        on: what is not cached and has a name already is computed a second time, and counts as
        private, too.
        """
        used, unused = self._used, self._unused
        found = self._found(blocks)
        fresh = [
            *dict.fromkeys(
                block for block in blocks[found:] if block not in used and block not in unused
            )
        ]
        for block in blocks[:found]:
            unused.pop(block, None)
            used[block] = used.get(block, 0) + 1
        used.update(dict.fromkeys(fresh, 1))
        self._coming.update(fresh)
        self.private += private + (len(blocks) - found - len(fresh)) * self.block_size
        self.shrink()
        return (*blocks[:found], *fresh)

    def ready(self, blocks: Iterable[int]) -> None:
        """Their KV is there, or will be before any later step reads it."""
        for block in blocks:
            if block in self._coming:
                self._coming.discard(block)
                self.stored.append(block)

    def give_back(self, blocks: Sequence[int], private: int) -> None:
        """Use them no more: those that take() has named, and all that is private."""
        used, unused, coming = self._used, self._unused, self._coming
        for block in reversed(blocks):
            if used[block] > 1:
                used[block] -= 1
                continue
            del used[block]
            if block in coming:
                coming.discard(block)
            else:
                unused[block] = None
        self.private -= private

    def shrink(self) -> None:
        """Let unused blocks go until all that is used fits."""
        most = max(0, self.free) // self.block_size
        while len(self._unused) > most:
            self.removed.append(self._unused.popitem(last=False)[0])

    def news(self) -> tuple[list[int], list[int]]:
        """What was stored and removed since the last time."""
        news = self.stored, self.removed
        if news[0] or news[1]:
            self.stored, self.removed = [], []
        return news
