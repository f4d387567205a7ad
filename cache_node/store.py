"""Stores of KV blocks, through NIXL: a folder of files (POSIX), or a bucket of objects (OBJ).

Each has a page that says whose KV it is, with the block's checksum, and then the block.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
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
# Of a transfer: more gain nothing, and objects take as much memory.
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

    def _agent_of(self, backend: str, kind: str, memory: tuple[int, int], **params: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._kind, self._backends = kind, [backend]
        self._agent: Any = nixl_agent(self._me, nixl_agent_config(backends=[]))
        self._agent.create_backend(backend, params)
        self._agent.register_memory([(*memory, 0, "")], "DRAM", backends=self._backends)

    def _page(self, name: BlockHash, checksum: bytes) -> bytes:
        size = self._region.block_bytes.to_bytes(8, "big")
        return _FORMAT + self.identity + name + size + checksum

    def _sound(
        self, names: Sequence[BlockHash], slots: Sequence[int], pages: Sequence[bytes]
    ) -> list[bytes]:
        """Return the checksums of blocks that were read, empty for what another one was written."""
        found = zip(names, self._sums(slots), pages, strict=True)
        return [
            sums if page.startswith(self._page(name, sums)) else b"" for name, sums, page in found
        ]

    def _slot(self, slot: int) -> int:
        return self._region.address + slot * self._region.block_bytes

    def _move(self, way: str, addresses: list[int], size: int, there: list[Any]) -> None:
        agent, backends = self._agent, self._backends
        remote = agent.register_memory(there, self._kind, backends=backends)
        try:
            local = agent.get_xfer_descs([(each, size, 0) for each in addresses], "DRAM")
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
        pool_bytes = self._region.num_blocks * self._region.block_bytes
        self._agent_of("POSIX", "FILE", (self._region.address, pool_bytes))

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

    def there(self, names: Sequence[BlockHash]) -> list[bool]:
        return [self._path(self.identity + name).exists() for name in names]

    def write(
        self, names: Sequence[BlockHash], slots: Sequence[int], checksums: Sequence[bytes]
    ) -> None:
        """Write all, or raise."""
        with ExitStack() as ends:
            parts, files = [], []
            for name, checksum in zip(names, checksums, strict=True):
                path = self._path(self.identity + name)
                part = path.with_name(f"{path.name}-{uuid.uuid4().hex}{_UNFINISHED}")
                ends.callback(_delete, part)
                file = ends.enter_context(open(part, "xb", buffering=0, opener=_private))
                file.write(self._page(name, checksum).ljust(PAGE, b"\0"))
                parts.append((part, path))
                files.append(file.fileno())
            self._blocks("WRITE", slots, files)
            for part, path in parts:
                part.rename(path)

    def read(self, names: Sequence[BlockHash], slots: Sequence[int]) -> list[bytes]:
        """Return the checksums of the first that are there; a damaged one, b"", ends them."""
        torn = False
        with ExitStack() as ends:
            files, pages = [], []
            for name in names:
                try:
                    opened = self._path(self.identity + name).open("rb", buffering=0)
                except FileNotFoundError:
                    break
                file = ends.enter_context(opened)
                if torn := os.fstat(file.fileno()).st_size != self.size:
                    break
                pages.append(file.read(PAGE))
                files.append(file.fileno())
            self._blocks("READ", slots[: len(files)], files)
            for each in files:
                with suppress(OSError):  # another user's
                    os.utime(each)
        return self._sound(names[: len(pages)], slots[: len(pages)], pages) + [b""] * torn

    def delete(self, key: bytes) -> None:
        _delete(self._path(key))

    def clear(self) -> None:
        for path in self._path(self.identity).iterdir():
            _delete(path)

    def _path(self, key: bytes) -> Path:
        name = key[16:].hex()
        return Path(self.place, key[:16].hex(), *([name] if name else []))

    def _blocks(self, way: str, slots: Sequence[int], files: Sequence[int]) -> None:
        there = [(PAGE, self._region.block_bytes, file, "") for file in files]
        if files:
            here = [self._slot(slot) for slot in slots]
            self._move(way, here, self._region.block_bytes, there)


# In a process of its own: cuFile takes memory of GPUs, and writes its log to where it is.
_OPEN_GDS = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("probe", nixl_agent_config(backends=[]))
assert "GDS" in agent.get_plugin_list(), "NIXL has no such plugin"
agent.create_backend("GDS")
"""


def look_for_gds() -> None:
    """Log whether NIXL can open its GDS plugin, which nothing uses. Takes a second."""
    command, found = [sys.executable, "-c", _OPEN_GDS], "can be opened here"
    try:
        with tempfile.TemporaryDirectory() as folder:  # nobody else may put modules there
            subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=folder, timeout=30
            )
    except subprocess.CalledProcessError as error:
        *_, why = error.stderr.splitlines() or [f"exit code {error.returncode}"]
        found = f"cannot be opened here ({why})"
    except (OSError, subprocess.TimeoutExpired) as error:
        found = f"cannot be opened here ({error})"
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
        self._memory = mmap.mmap(-1, self.batch * self.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        os.environ.setdefault("AWS_RETRY_MODE", "standard")
        os.environ.setdefault("AWS_MAX_ATTEMPTS", "1")  # eleven take 25 s: what fails is computed
        if "nixl" not in sys.modules:  # it takes nixl-cu13 if both are there
            with suppress(ModuleNotFoundError):
                sys.modules["nixl._api"] = import_module("nixl_cu12._api")
                sys.modules["nixl"] = sys.modules["nixl_cu12"]
        self._agent_of("OBJ", "OBJ", (self._address, len(self._memory)), bucket=bucket)

    def keys(self) -> list[tuple[bytes, int]]:
        return []

    def there(self, names: Sequence[BlockHash]) -> list[bool]:
        keys = [(0, 0, 0, self._prefix + name.hex()) for name in names]
        found = self._agent.query_memory(keys, "OBJ", mem_type="OBJ")
        return [
            each is not None and name not in self._bad
            for name, each in zip(names, found, strict=True)
        ]

    def write(
        self, names: Sequence[BlockHash], slots: Sequence[int], checksums: Sequence[bytes]
    ) -> None:
        """Write all, or raise."""
        for at, (name, checksum) in enumerate(zip(names, checksums, strict=True)):
            page = self._page(name, checksum).ljust(PAGE, b"\0")
            self._memory[at * self.size : at * self.size + PAGE] = page
            ctypes.memmove(self._block(at), self._slot(slots[at]), self._region.block_bytes)
        self._objects("WRITE", names)
        self._bad.difference_update(names)

    def read(self, names: Sequence[BlockHash], slots: Sequence[int]) -> list[bytes]:
        """Return checksums; b"": damaged."""
        self._objects("READ", names)
        for at, slot in enumerate(slots):
            ctypes.memmove(self._slot(slot), self._block(at), self._region.block_bytes)
        starts = range(0, len(names) * self.size, self.size)
        pages = [self._memory[start : start + PAGE] for start in starts]
        return self._sound(names, slots, pages)

    def delete(self, key: bytes) -> None:
        """Find it no more until it is written again."""
        self._bad.add(key[16:])

    def clear(self) -> None:
        """Find no object of before; a node that starts again does."""
        self._prefix += f"{uuid.uuid4().hex}/"

    def _block(self, at: int) -> int:
        return self._address + at * self.size + PAGE

    def _objects(self, way: str, names: Sequence[BlockHash]) -> None:
        there = [(0, self.size, at, self._prefix + name.hex()) for at, name in enumerate(names)]
        here = [self._address + at * self.size for at in range(len(names))]
        self._move(way, here, self.size, there)
