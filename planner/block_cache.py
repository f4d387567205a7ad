"""KV memory of a simulated node: named blocks, private tokens, and a prefix cache of unused blocks.

Like paged_engine/blocks.py, without block numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

__all__ = ["BlockCache"]


class BlockCache:
    """A KV memory in blocks of `block_size` tokens; counts are tokens."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.private = 0
        self._stored: dict[int, None] = {}
        self._removed: list[int] = []
        """Removed blocks of which nobody was told yet."""
        self._used: dict[int, int] = {}
        self._coming: set[int] = set()
        """Blocks in use whose KV is not there yet: each has one user."""
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return self.capacity - self.private - len(self._used) * self.block_size

    def cached(self, blocks: Sequence[int]) -> int:
        """Return how many tokens of these blocks, from the first on, are here."""
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
        shared = sum(block in self._used for block in blocks[: self._found(blocks)])
        return (len(blocks) - shared) * self.block_size + private <= self.free

    def take(self, blocks: Sequence[int], private: int) -> tuple[int, ...]:
        """Use these blocks and private tokens; return the newly named blocks.

        A named block that is not cached is computed again, as private tokens.
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
        """Note that the KV of blocks is there, or will be before a later step reads it."""
        for block in blocks:
            if block in self._coming:
                self._coming.discard(block)
                self._stored[block] = None

    def give_back(self, blocks: Sequence[int], private: int, made: Sequence[int] = ()) -> None:
        """End a use; `made` are further blocks, which an answer has filled."""
        used, unused, coming = self._used, self._unused, self._coming
        self.private -= private
        self.keep(made)
        for block in reversed(blocks):
            if used[block] > 1:
                used[block] -= 1
                continue
            del used[block]
            if block in coming:
                coming.discard(block)
            else:
                unused[block] = None

    def keep(self, blocks: Sequence[int]) -> None:
        """Have blocks, whose ends are pushed out first."""
        for block in reversed(blocks):
            if block in self._used:
                continue
            if block not in self._unused:
                self._stored[block] = None
            self._unused[block] = None
            self._unused.move_to_end(block)
        self.shrink()

    def shrink(self) -> None:
        most = max(0, self.free) // self.block_size
        while len(self._unused) > most:
            block = self._unused.popitem(last=False)[0]
            if block in self._stored:
                del self._stored[block]
            else:
                self._removed.append(block)

    def news(self) -> tuple[Collection[int], Collection[int]]:
        """Return the blocks that came and went since the last call."""
        told = self._stored, self._removed
        self._stored, self._removed = {}, []
        return told
