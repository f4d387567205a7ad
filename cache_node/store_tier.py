"""A tier of a store below host memory: a thread that reads and writes, and what waits for it.

The thread waits for as long as a disk or a bucket takes, because its memory is in their hands.
Nobody waits for the thread longer than DEADLINE_S.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import inf
from typing import TypeVar

from kvrelay.cache_node.store import BlockFiles, BlockObjects
from kvrelay.cache_node.table import CacheTable, Names
from kvrelay.paged_engine.blocks import Changes
from kvrelay.wire.engine_messages import TierStats
from kvrelay.wire.kv_events import ANY, BlockHash
from kvrelay.wire.log_lines import Seldom

__all__ = ["DEADLINE_S", "StoreTier"]

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
# After a failure, which computing or host memory makes good.
_PAUSE_S = 5.0
# Blocks that wait for a slow store; older ones are not written.
_QUEUED_WRITES = 1024
# Of the limit: what is written between two looks at what other nodes have done.
_LOOK = 1 / 16

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Ask:
    names: Names
    then: Callable[[], None]
    until: float


class StoreTier:
    """A tier below `table`; reads wait for one transfer of writes at most."""

    def __init__(
        self,
        table: CacheTable,
        store: BlockFiles | BlockObjects,
        limit: float,
        block_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`limit`: bytes at most; `block_s`: seconds for each block that is written, at least."""
        self._table, self._store, self._limit = table, store, limit
        self._block_s, self._wake = block_s, wake
        self._thread = ThreadPoolExecutor(1)
        self._done: deque[Callable[[], object]] = deque()
        self._busy_since = inf
        self._asks: list[_Ask] = []
        self._failures = Seldom()
        self._held = OrderedDict[bytes, int]()
        """Bytes by key in a folder, the least recently used first."""
        self._bytes = self._written = 0
        self._changes = Changes(dict.fromkeys(self.names()))
        self.to_write = deque[BlockHash](maxlen=_QUEUED_WRITES)
        self.stats = TierStats()
        self.next_at = self._resume_at = 0.0
        wait([self._look()], DEADLINE_S)  # the first engine is told what is there
        self.turn(0.0)

    def turn(self, now: float) -> None:
        while self._done:
            self._done.popleft()()
        for ask in [each for each in self._asks if each.until <= now]:
            self._fail(len(ask.names), f"no answer in {DEADLINE_S:g} s")
            self._resume_at = now + _PAUSE_S
            self._end(ask)
        if self.to_write and now >= self.next_at:
            self._write(now)
        self.stats.blocks = len(self._held)

    def names(self) -> list[BlockHash]:
        """Return what the store is known to hold; ANY if it cannot tell."""
        mine = self._store.identity
        return [ANY] if self._limit == inf else [k[16:] for k in self._held if k[:16] == mine]

    def news(self) -> Changes:
        """Return what has come and gone since the last call."""
        taken, self._changes = self._changes, Changes()
        return taken

    def read(self, names: Names, then: Callable[[], None]) -> None:
        """Bring the first of these names that are there into the table, and call `then`."""
        now, since = time.monotonic(), self._table.clears
        ask = _Ask(names[: self._table.pool.free], then, now + DEADLINE_S)
        self._asks.append(ask)

        def found(count: int | None) -> None:
            self._missed(ask, count)
            slots = self._table.room(count) if count and ask in self._asks else None
            if slots:
                self._do(partial(self._read, ask, slots), partial(landed, slots), len(slots))
            else:
                over(count)

        def landed(slots: list[int], sums: list[bytes] | None) -> None:
            self._table.landed(ask.names, slots, sums or (), since)
            self._missed(ask, None if sums is None else len(sums))
            self.stats.loaded += len(sums or ())
            for name in ask.names[: len(sums or ())]:
                with suppress(KeyError):
                    self._held.move_to_end(self._store.identity + name)
            over(sums)

        def over(result: object) -> None:
            if result is None:
                self._resume_at = time.monotonic() + _PAUSE_S
            self._end(ask)

        if not ask.names or now < self._resume_at or now > self._busy_since + DEADLINE_S:
            self._end(ask)
        else:
            self._do(partial(self._present, ask), found, len(ask.names))

    def clear(self) -> None:
        self.to_write.clear()
        self._held.clear()
        self._bytes = 0
        self._changes = Changes(dict.fromkeys(self.names()), cleared=True)
        self._do(self._store.clear, lambda _: self._look())

    def _end(self, ask: _Ask) -> None:
        if ask in self._asks:
            self._asks.remove(ask)
            ask.then()

    def _do(
        self, job: Callable[[], _T], then: Callable[[_T | None], object], blocks: int = 1
    ) -> Future[None]:
        """Call `then` in a later turn; with None if the job fails, which concerns `blocks`."""

        def work() -> None:
            result, self._busy_since = None, time.monotonic()
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - NIXL's errors have no common root
                self._done.append(partial(self._fail, blocks, f"{error}{self._store.hint}"))
            self._busy_since = inf
            self._done.append(partial(then, result))
            self._wake()

        return self._thread.submit(work)

    def _fail(self, blocks: int, why: str) -> None:
        self.stats.failed += blocks
        if times := self._failures.times(time.monotonic()):
            log.warning("kv_store %s fails, times=%d: %s", self._store.place, times, why)

    # What all nodes keep in the folder counts, and the least recently used makes room.

    def _look(self) -> Future[None]:
        self._written = 0
        return self._do(self._store.keys, self._looked)

    def _looked(self, keys: Sequence[tuple[bytes, int]] | None) -> None:
        if keys is None:
            return
        known, self._held = self._held.keys(), OrderedDict(keys)
        for key in known - self._held.keys():
            self._note(key, held=False)
        for key in self._held.keys() - known:
            self._note(key, held=True)
        self._bytes, victims = sum(self._held.values()), []
        for key, size in keys:
            if self._bytes <= self._limit:
                break
            victims.append(key)
            self._bytes -= size
        self._evict(victims, 0)
        self._do(partial(self._drop, victims), lambda _: None)

    def _evict(self, keys: Sequence[bytes], size: int) -> None:
        """Forget these, which had so many bytes."""
        self.stats.evicted += len(keys)
        self._bytes -= size
        for key in keys:
            del self._held[key]
            self._note(key, held=False)

    def _missed(self, ask: _Ask, count: int | None) -> None:
        """Forget the first block that was not there, or damaged; not one that nobody had time for."""
        if count is None or time.monotonic() >= ask.until:
            return
        for name in ask.names[count : count + 1]:
            size = self._held.pop(self._store.identity + name, 0)
            self._bytes -= size
            self._note(self._store.identity + name, held=False)

    def _note(self, key: bytes, *, held: bool) -> None:
        if key[:16] == self._store.identity:
            (self._changes.add if held else self._changes.drop)(key[16:])

    def _drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._store.delete(key)

    def _write(self, now: float) -> None:
        table, store, since = self._table, self._store, self._table.clears
        free, chosen, victims = self._limit - self._bytes, dict[bytes, int](), {}
        oldest = iter(self._held.items())
        victim = next(oldest, None)
        while self.to_write and len(chosen) < store.batch:
            name = self.to_write.popleft()
            slots = table.pool.lookup([name])
            if not slots or store.identity + name in self._held:
                continue
            while free < store.size and victim and table.worth(name, victim[0][16:]):
                victims[victim[0]] = victim[1]
                free, victim = free + victim[1], next(oldest, None)
            if free >= store.size:
                free -= store.size
                chosen[name] = slots[0]
        if not chosen:
            return
        self._evict(list(victims), sum(victims.values()))
        self.next_at = inf
        table.pool.share(list(chosen.values()))
        sums = {name: table.checksums[slot] for name, slot in chosen.items()}

        def write() -> bool:
            self._drop(list(victims))
            there = store.there(list(chosen))
            new = [name for name, known in zip(chosen, there, strict=True) if not known]
            if new:
                store.write(new, [chosen[name] for name in new], [sums[name] for name in new])
            return True

        def end(written: bool | None) -> None:
            table.pool.release(list(chosen.values()))
            self.next_at = now + (len(chosen) * self._block_s if written else _PAUSE_S)
            if not written or since != table.clears:
                return
            self.stats.stored += len(chosen)
            self._written += len(chosen) * store.size
            if self._limit < inf:
                for name in chosen:
                    self._held[store.identity + name] = store.size
                    self._changes.add(name)
                self._bytes += len(chosen) * store.size
            if self._written > self._limit * _LOOK:
                self._look()

        self._do(write, end, len(chosen))

    def _present(self, ask: _Ask) -> int:
        count, batch = 0, self._store.batch
        while count % batch == 0 and count < len(ask.names) and time.monotonic() < ask.until:
            found = self._store.there(ask.names[count : count + batch])
            if not found[0]:
                break
            count += len(list(takewhile(bool, found)))
        return count

    def _read(self, ask: _Ask, slots: Sequence[int]) -> list[bytes]:
        store, read = self._store, list[bytes]()
        while len(read) % store.batch == 0 and len(read) < len(slots):
            if time.monotonic() >= ask.until:
                break
            part = slice(len(read), min(len(read) + store.batch, len(slots)))
            names = [store.identity + name for name in ask.names[part]]
            try:
                sums = store.read(ask.names[part], slots[part])
            except Exception:
                self._drop(names)
                raise
            if b"" in sums:
                damaged = names[sums.index(b"")]
                log.warning("kv_store: a damaged block is dropped: %s", damaged.hex())
                self.stats.corrupt += 1
                self._drop([damaged])
            sums = list(takewhile(bool, sums))
            if not sums:
                break
            read += sums
        return read
