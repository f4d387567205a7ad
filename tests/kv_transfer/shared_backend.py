"""A backend for tests: pools are files mapped into memory, a READ is a copy that happens when
`gate` is open.

Works within one process and between processes, and says how a transfer ends when the test says so.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.wire.errors import ConfigError, PeerLost, TransferError

BLOCKS, BLOCK_BYTES = 16, 4096
REGION = PoolRegion(address=0, num_blocks=BLOCKS, block_bytes=BLOCK_BYTES, device="cpu")


class SharedBackend:
    """Set `gate` to let READs finish, `error` to let them fail, from any thread."""

    helps_readers = True

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.path, self.block_bytes = path, block_bytes
        path.write_bytes(bytes(BLOCKS * block_bytes))
        self.pool = _map(path)
        self.gate = threading.Event()
        self.gate.set()
        self.error: TransferError | None = None
        self.posted = threading.Event()
        self.peers: dict[str, tuple[Source, mmap.mmap]] = {}
        self.gone: set[str] = set()
        self.opened = threading.Event()
        self.has_closed = threading.Event()

    def prepare(self) -> None:
        pass

    def open(self) -> bytes:
        self.opened.set()
        return str(self.path).encode()

    def add_peer(self, source: Source) -> None:
        self.peers[source.generation] = source, _map(Path(source.metadata.decode()))

    def post_read(
        self, source: Source, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> object:
        self.posted.set()
        return source.generation, list(zip(remote_blocks, local_blocks, strict=True))

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, tuple)
        generation, pairs = handle
        if self.error is not None:
            raise PeerLost("it is gone") if generation in self.gone else self.error
        if not self.gate.is_set():
            return False
        source, pool = self.peers[generation]
        part = source.part
        for remote, local in pairs:
            theirs = remote * source.region.block_bytes + part.remote_start
            ours = local * self.block_bytes + part.local_start
            self.pool[ours : ours + part.num_bytes] = pool[theirs : theirs + part.num_bytes]
        return True

    def peer_gone(self, generation: str) -> None:
        self.gone.add(generation)

    def drop_peer(self, generation: str) -> None:
        self.peers.pop(generation, None)

    def progress(self) -> None:
        pass

    def close(self) -> None:
        self.has_closed.set()

    def write(self, index: int, content: bytes) -> None:
        """Fill one block."""
        self.pool[index * self.block_bytes : (index + 1) * self.block_bytes] = content

    def read(self, index: int) -> bytes:
        """One block."""
        return self.pool[index * self.block_bytes : (index + 1) * self.block_bytes]


class Refusing(SharedBackend):
    """Cannot reach anybody."""

    def add_peer(self, source: Source) -> None:
        raise TransferError("another host")


class Missing(SharedBackend):
    """Cannot be had on this machine."""

    def open(self) -> bytes:
        raise ConfigError(f"{self.path.name} is not installed")


def pattern(index: int) -> bytes:
    """What the source holds in a block: unlike any other block's, and unlike zeros."""
    return bytes((index * 37 + i // 7 + 1) % 256 for i in range(BLOCK_BYTES))


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
