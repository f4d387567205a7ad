"""A tier in host memory: the blocks that it holds, and those that are worth its room. Pure.

Reuse is *seen* of a block that a request has found, or that was stored again after it was lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.wire.engine_messages import TierStats
from kvrelay.wire.kv_events import BlockHash, CacheChanges

__all__ = ["CacheTable", "Reuse"]

# Names that are remembered, for each block that the tier has room for.
_HISTORY = 4


class Reuse:
    """A bounded memory of names, and whether their reuse was seen."""

    def __init__(self, limit: int) -> None:
        self._seen: OrderedDict[BlockHash, bool] = OrderedDict()
        self._limit = limit

    def came(self, names: Iterable[BlockHash], *, used: bool = False) -> None:
        """Note that blocks were stored, or used; the second time of either is a reuse."""
        for name in names:
            self._seen[name] = used or name in self._seen
            self._seen.move_to_end(name)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def worth(self, name: BlockHash, victim: BlockHash | None) -> bool:
        """Return whether a block may take another's room; None: the room is free.

        A victim whose reuse was seen is spared once for each time.
        """
        if victim is None or self._seen.get(name) or not self._seen.get(victim):
            return True
        self._seen[victim] = False
        return False


class CacheTable:
    """A table of the blocks in host memory, and of those in the engine's pool that it wants."""

    def __init__(self, slots: int) -> None:
        self.pool = BlockPool(slots + 1)  # one is the null block
        self.reuse = Reuse(_HISTORY * slots)
        self.checksums: dict[int, bytes] = {}
        """Checksums by slot, as their engine gave them."""
        self.clears = 0
        self.stats = TierStats()
        self._offered: dict[BlockHash, None] = {}  # the engine holds them, in order
        self._coming: set[BlockHash] = set()

    def note(self, changes: CacheChanges) -> None:
        """Note what the engine's pool gained, lost and used."""
        if changes.cleared:
            self.pool.reset()
            self._coming.clear()
            self.clears += 1
            self.forget_engine()
        for name in changes.removed:
            self._offered.pop(name, None)
        self.reuse.came(changes.stored)
        self.reuse.came(changes.used, used=True)
        blocks = [block for name in changes.used for block in self.pool.lookup([name])]
        self.pool.share(blocks)  # and evict them last
        self.pool.release(blocks)
        self.offer([*changes.stored, *changes.used])

    def forget_engine(self) -> None:
        self._offered.clear()

    def offer(self, names: Iterable[BlockHash]) -> None:
        """Note that the engine holds these."""
        lacks = (
            name for name in names if name not in self._coming and not self.pool.lookup([name])
        )
        self._offered.update(dict.fromkeys(lacks))

    def wanted(self, most: int) -> list[BlockHash]:
        """Return names to read from the engine now, the oldest first; each is told once."""
        names: list[BlockHash] = []
        victims = list(islice(self.pool.victims(), most))
        while self._offered and len(names) < len(victims):
            name = next(iter(self._offered))
            del self._offered[name]
            if self.reuse.worth(name, victims[len(names)]):
                names.append(name)
        self.expect(names)
        return names

    def room(self, count: int) -> list[int] | None:
        """Take slots for blocks that come; None if too many are in use."""
        cached = self.pool.cached
        slots = self.pool.allocate(count)
        self.stats.evicted += cached - self.pool.cached
        for slot in slots or ():
            self.checksums.pop(slot, None)
        return slots

    def landed(
        self,
        names: Sequence[BlockHash],
        slots: Sequence[int],
        checksums: Sequence[bytes],
        since: int,
    ) -> None:
        """Make blocks findable and let go of their slots; `since`: `clears` when they were asked.

        Slots without a checksum have nothing.
        """
        if since == self.clears:
            for name, slot, checksum in zip(names, slots, checksums, strict=False):
                self.checksums[slot] = checksum
                self.pool.publish(slot, name)
        self._coming.difference_update(names)
        self.pool.release(slots)

    def expect(self, names: Iterable[BlockHash]) -> None:
        """Ask for these no other time until they have `landed`."""
        self._coming.update(names)
