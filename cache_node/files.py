"""The files below a table: which blocks are written and read, by two threads.

Reads never wait for writes. What a thread brings is told in the loop's own thread.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from kvrelay.cache_node.store import BlockFiles, Damaged
from kvrelay.cache_node.table import CacheTable
from kvrelay.wire.engine_messages import TierStats
from kvrelay.wire.kv_events import BlockHash

__all__ = ["Files"]

log = logging.getLogger(__name__)

# Blocks that wait for a slow disk; further ones are not written.
_QUEUED_WRITES = 64


class Files:
    """A tier of files below `table`; `make` opens its folder, once for each thread."""

    def __init__(
        self,
        table: CacheTable,
        make: Callable[[], BlockFiles],
        limit: int,
        block_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`limit`: blocks at most; `block_s`: seconds that a write takes at least."""
        self._table, self._limit, self._block_s, self._wake = table, limit, block_s, wake
        self._reader, self._writer = make(), make()
        self._reads, self._writes = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.held = OrderedDict.fromkeys(self._reader.names())
        """Blocks in files, the least recently used first."""
        self._writing: set[BlockHash] = set()
        self._done: deque[Callable[[], None]] = deque()
        self.stats = TierStats()

    def tell(self) -> None:
        """Take what the threads have done."""
        while self._done:
            self._done.popleft()()

    def write(self, names: Sequence[BlockHash]) -> None:
        """Write what is worth it of blocks that the table has."""
        table = self._table
        for name, slot in zip(names, table.pool.lookup(names), strict=False):
            if name in self.held or len(self._writing) >= _QUEUED_WRITES:
                continue
            if table.reuse.worth(name, self._victim()):
                table.pool.share([slot])
                self._writing.add(name)
                job = self._writes.submit(self._write, name, slot, table.checksums[slot])
                self._then(job, partial(self._written, name, slot, table.clears))

    def read(self, names: Sequence[BlockHash], then: Callable[[], None]) -> None:
        """Bring the first of these names that are in files into the table, and call `then`."""
        table, found = self._table, list[BlockHash]()
        for name in names[: table.pool.free]:
            if name not in self.held:
                break
            self.held.move_to_end(name)
            found.append(name)
        slots = table.room(len(found))
        if not found or slots is None:
            then()
            return
        table.expect(found)
        job = self._reads.submit(self._read, found, slots)
        self._then(job, partial(self._was_read, found, slots, table.clears, then))

    def clear(self) -> None:
        """Delete all files; what is still to be written goes, too."""
        self.held.clear()
        self._writes.submit(self._writer.clear)

    def _victim(self) -> BlockHash | None:
        return next(iter(self.held)) if len(self.held) >= self._limit else None

    def _then(self, job: Future[Any], tell: Callable[[Any], None]) -> None:
        def done(job: Future[Any]) -> None:
            self._done.append(lambda: tell(job.result()))
            self._wake()

        job.add_done_callback(done)

    def _write(self, name: BlockHash, slot: int, checksum: bytes) -> bool:
        began = time.monotonic()
        written = self._writer.write(name, slot, checksum)
        time.sleep(max(0.0, self._block_s - (time.monotonic() - began)))
        return written

    def _written(self, name: BlockHash, slot: int, since: int, written: bool) -> None:
        self._table.pool.release([slot])
        self._writing.discard(name)
        if written and since == self._table.clears:
            self.stats.stored += 1
            if (victim := self._victim()) is not None:
                del self.held[victim]
                self.stats.evicted += 1
                self._reader.delete(victim)
            self.held[name] = None

    def _read(self, names: Sequence[BlockHash], slots: Sequence[int]) -> list[bytes]:
        found: list[bytes] = []
        for name, slot in zip(names, slots, strict=True):
            try:
                checksum = self._reader.read(name, slot)
            except Damaged as error:
                log.warning("kv_store: a damaged file is deleted: %s", error)
                self.stats.corrupt += 1
                break
            if checksum is None:
                break
            found.append(checksum)
        return found

    def _was_read(
        self,
        names: list[BlockHash],
        slots: list[int],
        since: int,
        then: Callable[[], None],
        found: list[bytes],
    ) -> None:
        self.stats.loaded += len(found)
        for name in names[len(found) :][:1]:
            self.held.pop(name, None)
        self._table.landed(names, slots, found, since)
        then()
