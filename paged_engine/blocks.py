"""Block accounting: ids, reference counts, prefix hashes. Pure Python; never touches a tensor.

A block is free (in LRU order; it may still carry the hash of what it holds), used (by one or more
requests), held (kept for a reader elsewhere) or quarantined (a transfer may still write to it).
Block 0 is the null block, never given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.wire.engine_messages import BlockText
from kvrelay.wire.hashes import BlockHash

__all__ = ["BlockPool", "Changes", "KeptBlocks", "NULL_BLOCK"]

NULL_BLOCK = 0


@dataclass(slots=True)
class Changes:
    """Which hashes have become findable, each with its parent's (None: it is a prompt's first), and
    which no more.
    """

    stored: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    removed: set[BlockHash] = field(default_factory=set)
    texts: dict[BlockHash, BlockText] = field(default_factory=dict)
    """Of those that are stored, where texts are noted."""
    cleared: bool = False
    """Before all that, nothing was findable any more."""

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.cleared)


class BlockPool:
    """All blocks of one KV pool. `num_blocks` counts the null block too."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        # Least recently used first. A freed request appends its last blocks first: tails are
        # evicted before heads.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._quarantined: set[int] = set()
        self._changes: Changes | None = None
        self.notes_texts = False
        """Whether `publish` should be told what is in a block."""

    @property
    def total(self) -> int:
        """Blocks that can be given out at all."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks that can be given out now."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks whose content can be found by its hash."""
        return len(self._block_of)

    @property
    def quarantined(self) -> int:
        """Blocks that a lost transfer may still write to."""
        return len(self._quarantined)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`. Takes nothing."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def free_after(self, shared: Iterable[int]) -> int:
        """Free blocks that would remain if `shared` (from lookup) were taken."""
        return len(self._free) - sum(1 for block in shared if not self._references[block])

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to cached blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Fresh blocks, or None if there are fewer. What they held is forgotten."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            self._forget(block)
        return taken

    def publish(
        self,
        block: int,
        block_hash: BlockHash,
        parent: BlockHash | None = None,
        text: BlockText | None = None,
    ) -> None:
        """Make a full, used block findable. The first block of equal content wins."""
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            if self._changes is not None:
                self._changes.stored[block_hash] = parent
                self._changes.removed.discard(block_hash)
                if text is not None:
                    self._changes.texts[block_hash] = text

    def reset(self) -> None:
        """Forget what every block holds. Who uses blocks keeps them, and nobody finds them any
        more.
        """
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        if self._changes is not None:
            self._changes = Changes(cleared=True)

    def note_changes(self, *, texts: bool = False) -> None:
        """Take down from now on what becomes findable and what no more; somebody takes it away with
        `changes`.
        """
        self._changes, self.notes_texts = Changes(), texts

    @property
    def changed(self) -> bool:
        """Whether there is anything to take away."""
        return bool(self._changes)

    def changes(self) -> Changes:
        """What has changed since the last call: of each hash, how it is now."""
        taken = self._changes or Changes()
        self._changes = Changes()
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block of a request, given in the order of its tokens."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    # Nothing to find here: reuse it before anything that is cached.
                    self._free.move_to_end(block, last=False)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Count used blocks as untouchable; they stay used until give_back after
        `leave_quarantine`.
        """
        self._quarantined.update(blocks)

    def leave_quarantine(self, blocks: Iterable[int]) -> None:
        """The transfer that could touch these blocks is over."""
        self._quarantined.difference_update(blocks)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        used = [block for block in range(1, self.num_blocks) if self._references[block]]
        assert len(used) + len(self._free) == self.total, (len(used), len(self._free), self.total)
        assert not any(self._references[block] for block in self._free)
        assert min(self._references) >= 0
        assert all(
            self._hash_of[block] == block_hash for block_hash, block in self._block_of.items()
        )
        assert sum(h is not None for h in self._hash_of) == len(self._block_of)
        assert all(self._references[block] for block in self._quarantined)
        assert self._hash_of[NULL_BLOCK] is None
        assert NULL_BLOCK not in self._free

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
            if self._changes is not None:
                self._changes.stored.pop(block_hash, None)
                self._changes.texts.pop(block_hash, None)
                self._changes.removed.add(block_hash)


class KeptBlocks:
    """Each goes in once and comes back to the pool once, by the id of the request or probe that had
    them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[str, list[int]] = {}
        self._unsettled: dict[str, list[int]] = {}

    def hold(self, request_id: str, blocks: list[int]) -> None:
        """Keep them until `released`."""
        self._held[request_id] = blocks

    def held(self, request_id: str) -> list[int] | None:
        """The blocks held for this request, in token order."""
        return self._held.get(request_id)

    def held_for(self, call_id: str) -> list[str]:
        """Ids of held requests that are `call_id` or were made for the call of that id (`<call
        id>-<suffix>`).
        """
        return [name for name in self._held if call_id in (name, name.rpartition("-")[0])]

    def release(self, request_id: str) -> None:
        """Nobody will read the blocks held for this request."""
        self._pool.release(self._held.pop(request_id, []))

    def quarantine(self, request_id: str, blocks: Sequence[int], shared: int = 0) -> None:
        """A transfer may still write to these blocks, except the first `shared`: untouchable until
        `settled`.
        """
        self._unsettled[request_id] = list(blocks)
        self._pool.quarantine(blocks[shared:])

    def quarantine_held(self, probe_id: str) -> None:
        """A transfer may still write to the blocks held for this probe: untouchable until
        `settled`.
        """
        self.quarantine(probe_id, self._held.pop(probe_id))

    def settle(self, request_id: str) -> None:
        """No transfer can touch the blocks of a failed or aborted fetch any more."""
        blocks = self._unsettled.pop(request_id, [])
        self._pool.leave_quarantine(blocks)
        self._pool.release(blocks)

    @property
    def num_held(self) -> int:
        """Blocks kept under a lease."""
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def blocks(self) -> list[int]:
        """All of them."""
        return [
            block
            for kept in (self._held, self._unsettled)
            for blocks in kept.values()
            for block in blocks
        ]
