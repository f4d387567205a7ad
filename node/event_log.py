"""KV events of a node in order: numbered batches, the newest of which can be told again, and all
that is held. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvrelay.wire.engine_messages import BlockText, CacheChanges
from kvrelay.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    pack_batch,
)

__all__ = ["EventLog"]

# A listener that has lost more than this gets all that is held instead, which is no more for a pool
# of 200,000 blocks, as long as their tokens are not told.
BUFFER_BYTES = 4 << 20
_MEDIUM = "GPU"
"""vLLM's word for the memory that the engine computes in, whatever the device."""


class EventLog:
    """Numbers count from 0. `buffer_steps` batches are kept, in BUFFER_BYTES at most; `maps`: the
    form of events.
    """

    def __init__(self, block_size: int, buffer_steps: int, *, maps: bool = False) -> None:
        self.next_number = 0
        self._block_size = block_size
        self._buffer_steps = buffer_steps
        self._maps = maps
        self._held: dict[bytes, bytes | None] = {}
        self._texts: dict[bytes, BlockText] = {}
        """Of those that are held, if they are told."""
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._snapshot: tuple[int, bytes] | None = None
        """All that was held after this number, as it was last told."""

    @property
    def held(self) -> int:
        """Blocks that are held now."""
        return len(self._held)

    def note(self, changes: CacheChanges, now: float) -> tuple[int, bytes]:
        """The next batch and its number. `now`: Unix seconds."""
        if changes.cleared:
            self._held.clear()
            self._texts.clear()
        for block_hash in changes.removed:
            self._held.pop(block_hash, None)
            self._texts.pop(block_hash, None)
        for block_hash, parent in changes.stored.items():
            self._held.pop(block_hash, None)  # behind its parent again
            self._held[block_hash] = parent
        self._texts |= changes.texts
        events: list[Event] = [AllBlocksCleared()] if changes.cleared else []
        if changes.removed:
            events.append(BlockRemoved(list(changes.removed), _MEDIUM))
        events += self._chains(changes.stored)
        number, payload = self.next_number, self._packed(events, now)
        self.next_number += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > BUFFER_BYTES or len(self._kept) > self._buffer_steps:
            self._kept_bytes -= len(self._kept.popleft()[1])
        return number, payload

    def since(self, number: int, now: float) -> list[tuple[int, bytes]]:
        """The batches from `number` on; if the first of them is kept no more, one that says all
        that was held then, and those behind it.

        That one is made anew only when its successor is kept no more: nobody makes it often by
        asking often.
        """
        if number >= self.next_number:
            return []
        first = self.next_number - len(self._kept)
        if number >= first:
            return [kept for kept in self._kept if kept[0] >= number]
        snapshot = self._snapshot
        if snapshot is None or snapshot[0] + 1 < first:
            payload = self._packed([AllBlocksCleared(), *self._chains(self._held)], now)
            snapshot = self._snapshot = (self.next_number - 1, payload)
        return [snapshot, *(kept for kept in self._kept if kept[0] > snapshot[0])]

    def _packed(self, events: list[Event], now: float) -> bytes:
        return pack_batch(EventBatch(now, events), maps=self._maps)

    def _chains(self, stored: dict[bytes, bytes | None]) -> Iterator[BlockStored]:
        """Each event is a chain: its blocks are parents of one another."""
        run: list[bytes] = []
        begins: bytes | None = None
        for block_hash, parent in stored.items():
            if run and parent != run[-1]:
                yield self._chain(run, begins)
                run = []
            if not run:
                begins = parent
            run.append(block_hash)
        if run:
            yield self._chain(run, begins)

    def _chain(self, run: list[bytes], begins: bytes | None) -> BlockStored:
        texts = [self._texts[block_hash] for block_hash in run if block_hash in self._texts]
        keys = [[key for key in (text.adapter, text.salt) if key] or None for text in texts]
        return BlockStored(
            block_hashes=[*run],
            parent_block_hash=begins,
            token_ids=[token for text in texts for token in text.token_ids],
            block_size=self._block_size,
            medium=_MEDIUM,
            lora_name=(texts[0].adapter or None) if texts else None,
            extra_keys=keys if any(keys) else None,
        )
