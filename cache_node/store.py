"""Stores of KV blocks, through NIXL: a folder of files (POSIX), or a bucket of objects (OBJ).

Each has a page that says whose KV it is, with the block's checksum, and then the block.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.cache_node.table import Names
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.kv_events import BlockHash

__all__ = ["PAGE", "BlockFiles", "BlockObjects", "look_for_gds"]

log = logging.getLogger("kvrelay.cache")

PAGE = 4096
_FORMAT = b"kvrelay 1"
_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = ".part"
# By then its writer has ended.
_UNFINISHED_S = 600.0
_POLL_S = 1e-4
# Of a transfer: more gain nothing, and take as much memory.
_BATCH_BYTES, _BATCH_BLOCKS = 16 << 20, 32

_private = partial(os.open, mode=0o600)


class _Blocks:
    """A part that both stores have. For one thread at a time, which waits for as long as NIXL."""

    _needs: str

    def __init__(
        self,
        place: str,
        identity: bytes,
        region: PoolRegion,
        sums: Callable[[Sequence[int]], list[bytes]],
    ) -> None:
        """Open the store; `sums` are of `region`. Raises ConfigError."""
        self.place, self.identity, self._region, self._sums = place, identity, region, sums
        self.batch = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // region.block_bytes))
        """Blocks of a transfer at most."""
        self.size = PAGE + region.block_bytes
        self._parts = np.zeros((self.batch, self.size), np.uint8)
        """Pages, each with its block, of the transfer under way."""
        pool = (ctypes.c_uint8 * (region.num_blocks * region.block_bytes)).from_address(
            region.address
        )
        self._pool = np.ctypeslib.as_array(pool).reshape(region.num_blocks, region.block_bytes)
        self._me = f"kv-store-{uuid.uuid4().hex}"
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what is missing is an error there
        try:
            self._open()
        except Exception as error:
            raise ConfigError(
                f"kv_store {place} cannot be opened ({error}); it needs {self._needs}"
            ) from error

    def _open(self) -> None:
        raise NotImplementedError

    def _agent_of(self, backend: str, kind: str, **params: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._kind, self._backends = kind, [backend]
        self._agent: Any = nixl_agent(self._me, nixl_agent_config(backends=[]))
        self._agent.create_backend(backend, params)
        memory = [(self._parts.ctypes.data, self._parts.nbytes, 0, "")]
        self._agent.register_memory(memory, "DRAM", backends=self._backends)

    def write(self, names: Names, slots: Sequence[int], checksums: Sequence[bytes]) -> None:
        """Write all, or raise."""
        for part, name, slot, checksum in zip(self._parts, names, slots, checksums, strict=False):
            part[:PAGE] = np.frombuffer(self._page(name, checksum).ljust(PAGE, b"\0"), np.uint8)
            part[PAGE:] = self._pool[slot]
        self._write(names)

    def read(self, names: Names, slots: Sequence[int]) -> list[bytes]:
        """Return the checksums of the first that are there; b"": damaged, or another one."""
        self._parts[:, :PAGE] = 0
        slots = slots[: self._read(names)]
        for part, slot in zip(self._parts, slots, strict=False):
            self._pool[slot] = part[PAGE:]
        found = zip(self._parts, names, self._sums(slots), strict=False)
        return [
            sums if part[:PAGE].tobytes().startswith(self._page(name, sums)) else b""
            for part, name, sums in found
        ]

    def _write(self, names: Names) -> None:
        raise NotImplementedError

    def _read(self, names: Names) -> int:
        raise NotImplementedError

    def _page(self, name: BlockHash, checksum: bytes) -> bytes:
        size = self._region.block_bytes.to_bytes(8, "big")
        return _FORMAT + self.identity + name + size + checksum

    def _move(self, way: str, places: Sequence[tuple[int, str]]) -> None:
        """Move the first blocks with their pages between our memory and these places."""
        if not places:
            return
        agent, backends, size = self._agent, self._backends, self.size
        there = [(0, size, *place) for place in places]
        here = [(part.ctypes.data, size, 0) for part in self._parts[: len(places)]]
        remote = agent.register_memory(there, self._kind, backends=backends)
        try:
            local = agent.get_xfer_descs(here, "DRAM")
            moved = agent.initialize_xfer(way, local, remote.trim(), self._me, backends=backends)
            try:
                state = agent.transfer(moved)
                while state == "PROC":
                    time.sleep(_POLL_S)
                    state = agent.check_xfer_state(moved)
            finally:
                agent.release_xfer_handle(moved)
        finally:
            agent.deregister_memory(remote, backends=backends)


class BlockFiles(_Blocks):
    """A folder, with a folder of each identity; nodes may share it."""

    hint = ""
    _needs = "NIXL (pip install 'kvrelay[node,nixl]') and a folder that this process may write to"

    def _open(self) -> None:
        self._path(self.identity).mkdir(0o700, parents=True, exist_ok=True)  # KV tells prompts
        self._agent_of("POSIX", "FILE")

    def keys(self) -> list[tuple[bytes, int]]:
        """Return identities with names, and sizes, the least recently used first."""
        found = []
        for folder in [each for each in os.scandir(self.place) if _NAME.fullmatch(each.name)]:
            entries = list[os.DirEntry[str]]()
            with suppress(OSError):  # another user's
                entries += os.scandir(folder)
            for entry in entries:
                with suppress(OSError):  # another node deletes, too
                    stat = entry.stat()
                    if _NAME.fullmatch(entry.name):
                        key = bytes.fromhex(folder.name + entry.name)
                        found.append((stat.st_mtime, key, stat.st_size))
                    elif entry.name.endswith(_UNFINISHED) and (
                        time.time() - stat.st_mtime > _UNFINISHED_S
                    ):
                        os.unlink(entry)
        return [(key, size) for _, key, size in sorted(found)]

    def there(self, names: Names) -> list[bool]:
        return [self._path(self.identity + name).exists() for name in names]

    def _write(self, names: Names) -> None:
        with ExitStack() as ends:
            parts, files = [], []
            for name in names:
                path = self._path(self.identity + name)
                part = path.with_name(f"{path.name}-{uuid.uuid4().hex}{_UNFINISHED}")
                ends.callback(_delete, part)
                files.append(ends.enter_context(open(part, "xb", buffering=0, opener=_private)))
                parts.append((part, path))
            self._move("WRITE", [(file.fileno(), "") for file in files])
            for part, path in parts:
                part.rename(path)

    def _read(self, names: Names) -> int:
        torn = False
        with ExitStack() as ends:
            files = []
            for name in names:
                try:
                    opened = self._path(self.identity + name).open("rb", buffering=0)
                except FileNotFoundError:
                    break
                file = ends.enter_context(opened).fileno()
                if torn := os.fstat(file).st_size != self.size:
                    break
                files.append(file)
            self._move("READ", [(file, "") for file in files])
            for each in files:
                with suppress(OSError):  # another user's
                    os.utime(each)
        return len(files) + torn

    def delete(self, key: bytes) -> None:
        _delete(self._path(key))

    def clear(self) -> None:
        for path in self._path(self.identity).iterdir():
            _delete(path)

    def _path(self, key: bytes) -> Path:
        name = key[16:].hex()
        return Path(self.place, key[:16].hex(), *([name] if name else []))


# In a process of its own: cuFile takes memory of GPUs, and writes its log to where it is.
_OPEN_GDS = """
import signal
signal.alarm(30)
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("probe", nixl_agent_config(backends=[]))
assert "GDS" in agent.get_plugin_list(), "NIXL has no such plugin"
agent.create_backend("GDS")
"""


def look_for_gds() -> None:
    """Log whether NIXL can open its GDS plugin, which nothing uses. Takes a second."""
    command = [sys.executable, "-c", _OPEN_GDS]
    with tempfile.TemporaryDirectory() as folder:  # nobody else may put modules there
        ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    *_, why = [f"exit code {ended.returncode}", *ended.stderr.splitlines()]
    found = f"cannot be opened here ({why})" if ended.returncode else "can be opened here"
    log.info("kv_store takes NIXL's POSIX plugin; GDS is not measured, and %s", found)


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


class BlockObjects(_Blocks):
    """A bucket of S3, or a part of it, s3://BUCKET/PREFIX; its lifecycle rules delete objects.

    NIXL neither lists nor deletes objects. AWS's environment variables name region, endpoint and
    credentials.
    """

    hint = "; NIXL tells no cause: check the bucket, AWS_REGION, AWS_ENDPOINT_URL, and credentials"
    _needs = "nixl-cu12, or beside nixl-cu13 CUDA 13.1's libcuobjclient.so.1, for NIXL's OBJ plugin"

    def _open(self) -> None:
        bucket, _, prefix = self.place.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/{self.identity.hex()}/".lstrip("/")
        self._bad = set[BlockHash]()
        os.environ.setdefault("AWS_RETRY_MODE", "standard")
        os.environ.setdefault("AWS_MAX_ATTEMPTS", "1")  # eleven take 25 s: what fails is computed
        if "nixl" not in sys.modules:  # it takes nixl-cu13 if both are there
            with suppress(ModuleNotFoundError):
                sys.modules["nixl._api"] = import_module("nixl_cu12._api")
                sys.modules["nixl"] = sys.modules["nixl_cu12"]
        self._agent_of("OBJ", "OBJ", bucket=bucket)

    def keys(self) -> list[tuple[bytes, int]]:
        return []

    def there(self, names: Names) -> list[bool]:
        keys = [(0, 0, *place) for place in self._places(names)]
        found = self._agent.query_memory(keys, "OBJ", mem_type="OBJ")
        return [
            each is not None and name not in self._bad
            for name, each in zip(names, found, strict=True)
        ]

    def _write(self, names: Names) -> None:
        self._move("WRITE", self._places(names))
        self._bad.difference_update(names)

    def _read(self, names: Names) -> int:
        self._move("READ", self._places(names))
        return len(names)

    def delete(self, key: bytes) -> None:
        """Find it no more until it is written again."""
        self._bad.add(key[16:])

    def clear(self) -> None:
        """Find no object of before; a node that starts again does."""
        self._prefix += f"{uuid.uuid4().hex}/"

    def _places(self, names: Names) -> list[tuple[int, str]]:
        return [(at, self._prefix + name.hex()) for at, name in enumerate(names)]
