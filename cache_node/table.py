"""A tier in host memory: the blocks that it holds, and those that are worth its room. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvrelay.paged_engine.blocks import NO_PIN, BlockPool
from kvrelay.wire.engine_messages import TierStats
from kvrelay.wire.kv_events import BlockHash, CacheChanges, Pin

__all__ = ["CacheTable", "Names"]

Names = Sequence[BlockHash]
# Names that are remembered, for each block that the tier has room for.
_HISTORY = 4


class CacheTable:
    def __init__(self, slots: int) -> None:
        self.pool = BlockPool(slots + 1)  # one is the null block
        self.checksums: dict[int, bytes] = {}
        self.clears = 0
        self.stats = TierStats()
        self._seen: OrderedDict[BlockHash, bool] = OrderedDict()
        """Blocks, and if a request has found them or they were stored again after a loss."""
        self._pins: dict[BlockHash, Pin] = {}
        """Pins of blocks that are not here yet."""
        self.offered: dict[BlockHash, None] = {}
        """Blocks that the engine holds, in order, unless they are being read."""

    def note(self, changes: CacheChanges) -> None:
        if changes.cleared:
            self.pool.reset()
            self.clears += 1
            self.offered.clear()
            self._pins.clear()
        for name in changes.removed:
            self.offered.pop(name, None)
        self.came(changes.stored)
        self.came(changes.used, used=True)
        blocks = [block for name in changes.used for block in self.pool.lookup([name])]
        self.pool.share(blocks)  # and evict them last
        self.pool.release(blocks)
        for name, pin in changes.pinned:
            if not self.pool.pin([name], pin) and name in self._seen:
                self._pins[name] = pin
        self.offered.update(dict.fromkeys([*changes.stored, *changes.used]))

    def came(self, names: Iterable[BlockHash], *, used: bool = False) -> None:
        for name in names:
            self._seen[name] = used or name in self._seen
            self._seen.move_to_end(name)
        while len(self._seen) > _HISTORY * self.pool.total:
            name, _ = self._seen.popitem(last=False)
            self._pins.pop(name, None)

    def worth(self, name: BlockHash, victim: BlockHash | None) -> bool:
        """Return whether a block may take another's room; None: the room is free."""
        known = self._seen.get(name, False) or name in self._pins
        return victim is None or known or not self._seen.get(victim)

    def wanted(self, most: int) -> list[BlockHash]:
        """Return names to read from the engine now, and forget that it holds them."""
        names: list[BlockHash] = []
        victims = list(islice(self.pool.victims(), most))
        while self.offered and len(names) < len(victims):
            name = next(iter(self.offered))
            del self.offered[name]
            if not self.pool.lookup([name]) and self.worth(name, victims[len(names)]):
                names.append(name)
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
        names: Names,
        slots: Sequence[int],
        checksums: Sequence[bytes],
        since: int,
    ) -> None:
        """Make blocks with checksums findable, and let go of slots; `since`: `clears` at the ask."""
        if since == self.clears:
            for name, slot, checksum in zip(names, slots, checksums, strict=False):
                self.checksums[slot] = checksum
                self.pool.publish(slot, name)
                self.pool.pin([name], self._pins.pop(name, NO_PIN))
        self.pool.release(slots)
