"""A folder of KV blocks, a file each, read and written through NIXL's POSIX back end.

A file is named by its block's hash: a page that says whose KV it is, with the block's checksum, then
the block. It is written under another name first. A torn, shortened or foreign file is deleted when
it is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.kv_events import BlockHash
from kvrelay.wire.log_lines import Seldom

__all__ = ["PAGE", "BlockFiles", "Damaged"]

log = logging.getLogger(__name__)

PAGE = 4096
_FORMAT = b"kvrelay 1"
_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = ".part"
# By then its writer has ended.
_UNFINISHED_S = 600.0
_POLL_S = 1e-4


class Damaged(Exception):
    """A file that is not what was written."""


class BlockFiles:
    """A folder for one thread. `read` and `write` wait for the disk."""

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        region: PoolRegion,
        sums: Callable[[Sequence[int]], list[bytes]],
    ) -> None:
        """Open it. `sums` gives the checksums of slots of `region`. Raises ConfigError."""
        self._folder, self._identity = folder / identity.hex(), identity
        self._region, self._sums = region, sums
        self._failed = Seldom()
        self._me = f"kv-store-{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
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
        """Return the blocks that are there, the oldest first, and clear what was left half."""
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                age = entry.stat().st_mtime
                if _NAME.fullmatch(entry.name):
                    found.append((age, bytes.fromhex(entry.name)))
                elif entry.name.endswith(_UNFINISHED) and time.time() - age > _UNFINISHED_S:
                    os.unlink(entry)
        return [name for _, name in sorted(found)]

    def write(self, name: BlockHash, slot: int, checksum: bytes) -> bool:
        """Write a block; return whether its file is there."""
        path = self._path(name)
        part = path.with_name(f"{path.name}-{uuid.uuid4().hex}{_UNFINISHED}")
        try:
            with part.open("xb", buffering=0) as file:
                file.write((self._head(name) + checksum).ljust(PAGE, b"\0"))
                self._move("WRITE", slot, file.fileno())
            part.rename(path)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common root
            part.unlink(missing_ok=True)
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
