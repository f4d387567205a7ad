"""A folder of KV blocks, a file each, read and written through NIXL's POSIX back end.

A file has a page that says whose KV it is, with the block's checksum, and then the block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import Any

from kvrelay.cache_node.table import CacheTable
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.paged_engine.blocks import Changes
from kvrelay.wire.engine_messages import TierStats
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.kv_events import BlockHash
from kvrelay.wire.log_lines import Seldom

__all__ = ["PAGE", "BlockFiles", "Damaged", "Files"]

log = logging.getLogger(__name__)

PAGE = 4096
_FORMAT = b"kvrelay 1"
_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = ".part"
# By then its writer has ended.
_UNFINISHED_S = 600.0
_POLL_S = 1e-4
# Blocks that wait for a slow disk; older ones are not written.
_QUEUED_WRITES = 1024


_private = partial(os.open, mode=0o600)


class Damaged(Exception):
    """A file that is not what was written."""


class BlockFiles:
    """A folder, for one thread at a time."""

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        region: PoolRegion,
        sums: Callable[[Sequence[int]], list[bytes]],
    ) -> None:
        """Open it; `sums` are of `region`. Raises ConfigError."""
        self._folder, self._identity = folder / identity.hex(), identity
        self._region, self._sums = region, sums
        self._failed = Seldom()
        self._me = f"kv-store-{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)  # KV tells what was asked
            os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # a short file is an error there
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(self._me, nixl_agent_config(backends=[]))
            self._agent.create_backend("POSIX")
            memory = (region.address, region.num_blocks * region.block_bytes, 0, "")
            self._agent.register_memory([memory], "DRAM", backends=["POSIX"])
        except Exception as error:
            raise ConfigError(
                f"kv_store {folder} cannot be opened ({error}); it needs NIXL (pip install "
                "'kvrelay[node,nixl]') and a folder that this process may write to"
            ) from error

    def names(self) -> list[BlockHash]:
        """Return the blocks that are there, the oldest first; delete what was left half."""
        found = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another node deletes, too
                age = path.stat().st_mtime
                if _NAME.fullmatch(path.name):
                    found.append((age, bytes.fromhex(path.name)))
                elif path.suffix == _UNFINISHED and time.time() - age > _UNFINISHED_S:
                    path.unlink()
        return [name for _, name in sorted(found)]

    def write(self, name: BlockHash, slot: int, checksum: bytes) -> bool:
        path = self._path(name)
        part = path.with_name(f"{path.name}-{uuid.uuid4().hex}{_UNFINISHED}")
        try:
            with open(part, "xb", buffering=0, opener=_private) as file:
                file.write((self._head(name) + checksum).ljust(PAGE, b"\0"))
                self._move("WRITE", slot, file.fileno())
            part.rename(path)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common root
            with contextlib.suppress(OSError):
                part.unlink()
            if times := self._failed.times(time.monotonic()):
                log.warning("kv_store: a block was not written, times=%d: %s", times, error)
            return False
        return True

    def read(self, name: BlockHash, slot: int) -> bytes | None:
        """Read a block; return its checksum, or None if there is no such file. Raises Damaged."""
        head = self._head(name)
        try:
            with self._path(name).open("rb", buffering=0) as file:
                page = file.read(PAGE)
                self._move("READ", slot, file.fileno())
            (checksum,) = self._sums([slot])
            if page.startswith(head + checksum):
                return checksum
            raise Damaged("it has other bytes than were written")
        except FileNotFoundError:
            return None
        except Exception as error:
            self.delete(name)
            raise Damaged(f"{name.hex()}: {error}") from error

    def delete(self, name: BlockHash) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def clear(self) -> None:
        for name in self.names():
            self.delete(name)

    def _head(self, name: BlockHash) -> bytes:
        return _FORMAT + self._identity + name + self._region.block_bytes.to_bytes(8, "big")

    def _path(self, name: BlockHash) -> Path:
        return self._folder / name.hex()

    def _move(self, way: str, slot: int, file: int) -> None:
        agent, size = self._agent, self._region.block_bytes
        there = agent.register_memory([(PAGE, size, file, "")], "FILE", backends=["POSIX"])
        try:
            here = agent.get_xfer_descs([(self._region.address + slot * size, size, 0)], "DRAM")
            transfer = agent.initialize_xfer(way, here, there.trim(), self._me, backends=["POSIX"])
            try:
                state = agent.transfer(transfer)
                while state == "PROC":
                    time.sleep(_POLL_S)
                    state = agent.check_xfer_state(transfer)
            finally:
                agent.release_xfer_handle(transfer)
        finally:
            agent.deregister_memory(there, backends=["POSIX"])


class Files:
    """A tier of files below `table`, with a thread: reads wait for one write at most."""

    def __init__(
        self,
        table: CacheTable,
        files: BlockFiles,
        limit: int,
        block_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`limit`: blocks at most; `block_s`: seconds from write to write at least."""
        self._table, self._files, self._limit = table, files, limit
        self._block_s, self._wake = block_s, wake
        self._thread = ThreadPoolExecutor(1)
        self.held = OrderedDict.fromkeys(files.names())  # the least recently used first
        while len(self.held) > limit:
            files.delete(self.held.popitem(last=False)[0])
        self._changes = Changes()
        self.to_write = deque[BlockHash](maxlen=_QUEUED_WRITES)
        self._done: deque[Callable[[], None]] = deque()
        self.stats = TierStats()
        self.next_at = 0.0

    def turn(self, now: float) -> None:
        while self._done:
            self._done.popleft()()
        while self.to_write and now >= self.next_at:
            name = self.to_write.popleft()
            victim = next(iter(self.held)) if len(self.held) >= self._limit else None
            slots = self._table.pool.lookup([name])
            if slots and name not in self.held and self._table.worth(name, victim):
                self._write(name, slots, victim, now)

    def read(self, names: Sequence[BlockHash], then: Callable[[], None]) -> None:
        """Bring the first of these names that are in files into the table, and call `then`."""
        table, since = self._table, self._table.clears
        found = list(takewhile(self.held.__contains__, names[: table.pool.free]))
        slots = table.room(len(found))
        if not slots:
            then()
            return
        for name in found:
            self.held.move_to_end(name)

        def read() -> Callable[[], None]:
            sums = self._read(found, slots)
            return lambda: landed(sums)

        def landed(sums: list[bytes]) -> None:
            self.stats.loaded += len(sums)
            for name in found[len(sums) :][:1]:
                self._forget(name)
            table.landed(found, slots, sums, since)
            then()

        self._do(read)

    def clear(self) -> None:
        self.held.clear()
        self._changes = Changes(cleared=True)
        self.to_write.clear()

        def clear() -> Callable[[], None]:
            self._files.clear()
            return lambda: None

        self._do(clear)

    def news(self) -> Changes:
        """Return what has come and gone since the last call."""
        taken, self._changes = self._changes, Changes()
        return taken

    def _forget(self, name: BlockHash) -> None:
        self.held.pop(name, None)
        self._changes.drop(name)

    def _do(self, job: Callable[[], Callable[[], None]]) -> None:

        def work() -> None:
            self._done.append(job())
            self._wake()

        self._thread.submit(work)

    def _write(
        self, name: BlockHash, slots: list[int], victim: BlockHash | None, now: float
    ) -> None:
        table, since, self.next_at = self._table, self._table.clears, inf
        table.pool.share(slots)
        checksum = table.checksums[slots[0]]

        def write() -> Callable[[], None]:
            written = self._files.write(name, slots[0], checksum)
            if written and victim is not None:
                self._files.delete(victim)
            return lambda: end(written)

        def end(written: bool) -> None:
            table.pool.release(slots)
            self.next_at = now + self._block_s
            if written and since == table.clears:
                self.stats.stored += 1
                if victim is not None:
                    self._forget(victim)
                    self.stats.evicted += 1
                self.held[name] = None
                self._changes.add(name)

        self._do(write)

    def _read(self, names: Sequence[BlockHash], slots: Sequence[int]) -> list[bytes]:
        found: list[bytes] = []
        for name, slot in zip(names, slots, strict=True):
            try:
                checksum = self._files.read(name, slot)
            except Damaged as error:
                log.warning("kv_store: a damaged file is deleted: %s", error)
                self.stats.corrupt += 1
                break
            if checksum is None:
                break
            found.append(checksum)
        return found
