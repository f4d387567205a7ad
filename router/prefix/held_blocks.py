"""Which nodes hold which blocks of KV, as their events say. Pure.

By block, not by node: a prompt is looked up for all nodes at once, in as many steps as it has
blocks. Nodes are bits of one integer, a *mark* each. A node that has restarted gets another mark,
so forgetting all it had costs nothing now; its old bit is cleared bit by bit later, while other
events are taken in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

__all__ = ["HeldBlocks"]

LIMIT = 4_000_000
"""Blocks that are known at once: about 100 bytes each, and 330 GPUs with pools of 12,000 blocks of
8 MiB.
"""
# What is swept at once.
_SWEEP = 1_000


class HeldBlocks:
    """A table of who holds what. Keys are 64 bits of a hash (wire/kv_events.py)."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._holders: dict[int, int] = {}
        self._sweeps: Iterator[None] = iter(())
        self.sweeping = 0
        """The marks that are being cleared; 0 if none are."""

    def __len__(self) -> int:
        return len(self._holders)

    def stored(self, mark: int, keys: Iterable[int]) -> None:
        """Note that a node holds these blocks now. A full table forgets the eighth of blocks that
        came first.
        """
        holders = self._holders
        for key in keys:
            holders[key] = holders.get(key, 0) | mark
        while len(holders) > self._limit:
            for key in list(islice(holders, self._limit // 8)):
                del holders[key]
        self.sweep()

    def removed(self, mark: int, keys: Iterable[int]) -> None:
        """Note that it holds these no more."""
        for key in keys:
            self._clear(key, mark)
        self.sweep()

    def steps(self, keys: Sequence[int], marks: int) -> list[tuple[int, int]]:
        """Return how many of these blocks, from the first on, which of these nodes hold. The most
        come last.
        """
        found: list[tuple[int, int]] = []
        if not (keys and marks):
            return found
        holders = self._holders
        for at, key in enumerate(keys):
            left = holders.get(key, 0) & marks
            if left != marks:
                if at:
                    found.append((at, marks))
                marks = left
                if not left:
                    break
        else:
            found.append((len(keys), marks))
        return found

    def forget(self, marks: int) -> None:
        """Begin to clear these marks, which no node has any more."""
        assert not self.sweeping, "one sweep at a time"
        self.sweeping, self._sweeps = marks, self._swept(list(self._holders), marks)

    def sweep(self) -> None:
        """Clear a piece of what `forget` has begun to."""
        next(self._sweeps, None)

    def _swept(self, keys: list[int], marks: int) -> Iterator[None]:
        for at, key in enumerate(keys):
            if at and not at % _SWEEP:
                yield
            self._clear(key, marks)
        self.sweeping = 0

    def _clear(self, key: int, marks: int) -> None:
        before = self._holders.get(key, 0)
        if before == before & marks:
            self._holders.pop(key, None)
        elif before & marks:
            self._holders[key] = before & ~marks
