"""Which nodes hold which blocks of KV, as their events say. Pure.

By block, not by node: a prompt is looked up for all nodes at once, in as many steps as it has blocks. Nodes are bits of
one integer, a *mark* each. A node that has restarted gets another mark, so forgetting all it had costs nothing now; its
old bit is cleared bit by bit later, while other events are taken in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = ["HeldBlocks"]

LIMIT = 4_000_000
"""Blocks that are remembered: about 100 bytes each, and 330 GPUs with pools of 12,000 blocks of 8 MiB."""
# What is swept at once.
_SWEEP = 1_000


class HeldBlocks:
    """Keys are 64 bits of a hash (wire/kv_events.py)."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._holders: dict[int, int] = {}
        # One int object for each mark: most blocks are held by one node.
        self._alone: dict[int, int] = {}
        self._asked: set[int] = set()
        self._to_sweep: list[int] = []
        self._sweeping = 0

    def __len__(self) -> int:
        return len(self._holders)

    def stored(self, mark: int, keys: Iterable[int]) -> None:
        """A node holds these blocks now."""
        mark, holders = self._alone.setdefault(mark, mark), self._holders
        for key in keys:
            before = holders.get(key)
            holders[key] = mark if before is None else before | mark
        if len(holders) > self._limit:
            self._drop_oldest()
        self.sweep()

    def removed(self, mark: int, keys: Iterable[int]) -> None:
        """It holds these no more."""
        holders = self._holders
        for key in keys:
            before = holders.get(key)
            if before is not None:
                after = before & ~mark
                if after:
                    holders[key] = self._alone.get(after, after)
                else:
                    del holders[key]
        self.sweep()

    def steps(self, keys: Sequence[int], marks: int) -> list[tuple[int, int]]:
        """How many of these blocks, from the first on, which of the nodes in `marks` hold. The most come last."""
        found: list[tuple[int, int]] = []
        holders = self._holders
        at = 0
        for key in keys:
            left = holders.get(key, 0) & marks
            if left != marks:
                if at:
                    found.append((at, marks))
                marks = left
                if not left:
                    break
            at += 1
        if marks and at:
            found.append((at, marks))
        if 2 * len(holders) > self._limit:
            self._asked.update(keys)
        return found

    def forget(self, marks: int) -> None:
        """Begin to clear these marks, which no node has any more."""
        assert not self.sweeping, "one sweep at a time"
        self._sweeping = marks
        self._to_sweep = list(self._holders)
        for mark in [mark for mark in self._alone if mark & marks]:
            del self._alone[mark]

    @property
    def sweeping(self) -> int:
        """The marks that are being cleared; 0 if none are."""
        return self._sweeping

    def sweep(self) -> None:
        """Clear a piece of what `forget` has begun to."""
        if not self._sweeping:
            return
        piece = self._to_sweep[-_SWEEP:]
        del self._to_sweep[-_SWEEP:]
        keep = ~self._sweeping
        for key in piece:
            before = self._holders.get(key)
            if before is not None and before != before & keep:
                after = before & keep
                if after:
                    self._holders[key] = self._alone.get(after, after)
                else:
                    del self._holders[key]
        if not self._to_sweep:
            self._sweeping = 0

    def _drop_oldest(self) -> None:
        """An eighth; those that somebody has asked for since the last time stay, as the newest."""
        oldest = list(islice(self._holders, self._limit // 8))
        for key in oldest:
            marks = self._holders.pop(key)
            if key in self._asked:
                self._holders[key] = marks
        self._asked.clear()
        for key in list(islice(self._holders, max(0, len(self._holders) - self._limit))):
            del self._holders[key]
