"""Block accounting: ids, reference counts, prefix hashes. Pure Python.

A block is free (in LRU order; its hash may still be known), used, held (for a reader elsewhere) or
quarantined (a transfer may still write to it). Block 0, the null block, is never given out.

A pinned block is evicted after all others, those with the longest time last, but no request waits
for a pin to end. Each use begins its time anew, so free blocks of equal times are a line, in the
order in which they expire.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile

import msgspec

from kvrelay.wire.kv_events import BlockHash, Pin

__all__ = ["BlockPool", "Changes", "KeptBlocks", "NULL_BLOCK"]

NULL_BLOCK = 0
NO_PIN = Pin()


@dataclass(slots=True)
class Changes:
    """A record of hashes that became findable or no longer are."""

    stored: dict[BlockHash, None] = field(default_factory=dict)  # in order
    removed: set[BlockHash] = field(default_factory=set)
    cleared: bool = False
    used: dict[BlockHash, None] = field(default_factory=dict)
    """Hashes that requests have found."""
    pinned: dict[BlockHash, Pin] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.cleared or self.used)

    def add(self, name: BlockHash) -> None:
        self.stored[name] = None
        self.removed.discard(name)

    def drop(self, name: BlockHash) -> None:
        self.stored.pop(name, None)
        self.removed.add(name)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        # Free blocks by the seconds of their pins, with the end of their time; 0: not pinned. The
        # least recently used first; tails are evicted before heads.
        self._lines = defaultdict[int, OrderedDict[int, float]](OrderedDict)
        self._lines[0] = OrderedDict.fromkeys(range(1, num_blocks), math.inf)
        self._pins: dict[int, Pin] = {}
        self._pinned_of: Counter[str] = Counter()
        self._most_pinned = self._longest_s = 0
        self.now = 0.0
        self.pins_refused = 0
        self._changes: Changes | None = None
        self._notes_use = False

    @property
    def total(self) -> int:
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def pinned(self) -> int:
        return len(self._pins)

    @property
    def cached(self) -> int:
        return len(self._block_of)

    def names(self) -> Iterable[BlockHash]:
        return self._block_of.keys()

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix, without taking them."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def free_after(self, shared: Iterable[int]) -> int:
        return self.free - sum(1 for block in shared if not self._references[block])

    def share(self, blocks: Iterable[int], *, used: bool = False) -> None:
        """Take references; `used`: a request has found these."""
        for block in blocks:
            if not self._references[block]:
                del self._line(block)[block]
            self._references[block] += 1
            name = self._hash_of[block]
            if used and self._notes_use and self._changes is not None and name is not None:
                self._changes.used[name] = None

    def victims(self) -> Iterator[BlockHash | None]:
        """Yield what `allocate` would forget before pins, the next one first; None for nothing."""
        return (self._hash_of[block] for block in self._lines[0])

    def allocate(self, count: int) -> list[int] | None:
        """Take fresh blocks; None if there are fewer."""
        if not count:
            return []  # as mostly in a decode step
        if count > self.free:
            return None
        lines = (line for _, line in sorted(self._lines.items()))
        taken = list(islice(chain.from_iterable(lines), count))
        for block in taken:
            del self._line(block)[block]
            self._references[block] = 1
            self.forget(block)
        return taken

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Make a full, used block findable. Of equal blocks the first wins."""
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            if self._changes is not None:
                self._changes.add(block_hash)

    def forget(self, block: int) -> None:
        """Let nobody find this block any more."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._set_pin(block, NO_PIN)
            del self._block_of[block_hash]
            self._hash_of[block] = None
            if self._changes is not None:
                self._changes.drop(block_hash)

    def reset(self) -> None:
        for block in list(self._pins):
            self._set_pin(block, NO_PIN)
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        if self._changes is not None:
            self._changes = Changes(cleared=True)

    def note_changes(self, *, use: bool = False) -> None:
        self._changes, self._notes_use = Changes(), use

    @property
    def changed(self) -> bool:
        return bool(self._changes)

    def changes(self) -> Changes:
        """Return the changes since the last call: each hash's newest state."""
        taken = self._changes or Changes()
        self._changes = Changes()
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                # Without a hash there is nothing to find here: reuse it first.
                self._put(block, first=self._hash_of[block] is None)

    def allow_pins(self, share: float, longest_s: int) -> None:
        """Let this share of the blocks be pinned, for so long after each use."""
        self._most_pinned, self._longest_s = int(share * self.total), longest_s

    def pin(self, names: Sequence[BlockHash], pin: Pin) -> int:
        """Pin blocks until a budget is spent; return how many are, the first ones.

        Of two pins the longer one counts.
        """
        pin = msgspec.structs.replace(pin, seconds=min(pin.seconds, self._longest_s))
        most = int(pin.share * self.total)
        for count, name in enumerate(names):
            block = self._block_of.get(name)
            if block is None or not pin.seconds:
                return count
            before = self._pins.get(block)
            if before and before.seconds >= pin.seconds:
                continue
            mine = self._pinned_of[pin.owner] - bool(before and before.owner == pin.owner)
            if mine >= most or self.pinned - bool(before) >= self._most_pinned:
                self.pins_refused += 1
                return count
            self._set_pin(block, pin)
            if self._notes_use and self._changes is not None:
                self._changes.pinned[name] = pin
        return len(names)

    def expire(self, now: float) -> None:
        """End pins whose time is over: these blocks are evicted next."""
        self.now = now
        for line in self._lines.values():
            over = list(takewhile(lambda each: each[1] <= now, line.items()))
            for block, _ in reversed(over):
                self._set_pin(block, NO_PIN)

    def _set_pin(self, block: int, pin: Pin) -> None:
        free = not self._references[block]
        if free:
            del self._line(block)[block]
        if before := self._pins.pop(block, None):
            self._pinned_of[before.owner] -= 1
        if pin.seconds:
            self._pins[block] = pin
            self._pinned_of[pin.owner] += 1
        if free:
            self._put(block, first=not pin.seconds)

    def _line(self, block: int) -> OrderedDict[int, float]:
        return self._lines[self._pins.get(block, NO_PIN).seconds]

    def _put(self, block: int, *, first: bool) -> None:
        line, pin = self._line(block), self._pins.get(block, NO_PIN)
        line[block] = self.now + (pin.seconds or math.inf)
        line.move_to_end(block, last=not first)


class KeptBlocks:
    """A table of blocks of ended requests that are not free yet.

    *Held* blocks are kept for a reader, *lent* ones of the prefix cache as well. To *unsettled* ones
    a transfer may still write.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[str, list[int]] = {}
        self._lent: dict[str, list[int]] = {}
        self._unsettled: dict[str, tuple[list[int], int]] = {}

    def hold(self, request_id: str, blocks: list[int]) -> None:
        self._held[request_id] = blocks

    def lend(self, request_id: str, blocks: list[int]) -> None:
        self._lent[request_id] = blocks

    def held(self, request_id: str) -> list[int] | None:
        return self._held.get(request_id)

    def held_for(self, call_id: str) -> list[str]:
        """Return ids of held requests: `call_id`, alone or with a suffix."""
        return [name for name in self._held if call_id in (name, name.rpartition("-")[0])]

    def release(self, request_id: str) -> None:
        for kept in (self._held, self._lent):
            self._pool.release(kept.pop(request_id, []))

    def quarantine(self, request_id: str, blocks: Sequence[int], shared: int = 0) -> None:
        """Keep blocks until `settle`; a transfer may write to all but the first `shared`."""
        self._unsettled[request_id] = list(blocks), shared

    def settle(self, request_id: str) -> None:
        blocks, _ = self._unsettled.pop(request_id, ([], 0))
        self._pool.release(blocks)

    @property
    def num_held(self) -> int:
        return sum(map(len, self._held.values())) + self.num_lent

    @property
    def num_lent(self) -> int:
        return sum(map(len, self._lent.values()))

    @property
    def quarantined(self) -> int:
        return sum(len(blocks) - shared for blocks, shared in self._unsettled.values())
