"""The direct data plane: nodes of one host map each other's KV pool, and the reader copies blocks
out of the mapping.

Owns which peers can be read from, and the proof that a mapped pool is theirs; mapping and copying
are `mapped_host`'s (CPU) and `mapped_gpu`'s. Everything else of a transfer (leases, fences,
deadlines) is the desk's. Nobody on the source's side takes part in a read, so it always ends,
whatever becomes of the source: memory stays there while it is mapped, and whether the bytes still
were the right ones is for the desk's fences to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvrelay.kernels.pool_memory import PoolMemory, nonce_offset, pool_memory
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.host_files import HostFile
from kvrelay.kv_transfer.mapped_gpu import GpuPiece, GpuSide
from kvrelay.kv_transfer.mapped_host import HostSide
from kvrelay.kv_transfer.planes import Source
from kvrelay.wire.errors import ConfigError, TransferError
from kvrelay.wire.frames import MALFORMED

__all__ = ["DirectPlane", "Metadata"]


class Metadata(msgspec.Struct, frozen=True):
    """What a peer is told, as msgpack."""

    boot_id: str
    nonce: bytes
    place: HostFile | GpuPiece


@dataclass(frozen=True, slots=True)
class _Remote:
    source: Source
    pool: Any
    """As its side has mapped it."""


class Side(Protocol):
    """What differs between a CPU and a GPU: places, mapped pools and handles are the side's own."""

    def open(self, memory: PoolMemory) -> Any:
        """Get ready to copy into our pool. Returns its place. Raises ConfigError, or OSError
        without /proc.
        """

    def map(self, source: Source, place: Any) -> Any:
        """Map a peer's pool. Raises TransferError."""

    def nonce(self, pool: Any, offset: int) -> bytes:
        """What lies there in a mapped pool. Raises TransferError."""

    def unmap(self, pool: Any) -> None:
        """Give a mapping back, once nothing reads it."""

    def start(
        self, source: Source, pool: Any, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> Any:
        """Begin to copy the source's part of these blocks. Returns a handle."""

    def poll(self, handle: Any) -> bool:
        """Go on copying; True when all bytes are in. Called until then."""


class DirectPlane:
    """A `DataPlane` over mapped memory. All methods run on one thread."""

    helps_readers = False

    def __init__(self, region: PoolRegion) -> None:
        """Takes nothing before `open`. The region's pool must outlive the plane."""
        self._region = region
        self._side: Side = HostSide(region) if region.device == "cpu" else GpuSide(region)
        self._remotes: dict[str, _Remote] = {}

    def prepare(self) -> None:
        """Nothing: opening takes no socket, so there is no reason to do it later than at start."""

    def open(self) -> bytes:
        """Returns the metadata. On a GPU it compiles the kernel, which may take seconds."""
        memory = pool_memory(self._region.address)
        if memory is None or memory.num_bytes != self._region.num_blocks * self._region.block_bytes:
            raise ConfigError(
                "kv_connector direct needs a KV pool in memory that peers can map, and this "
                "system gave none (memfd is "
                "missing or forbidden); use kv_connector nixl"
            )
        try:
            self._boot_id = (
                Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            )
            self._place = self._side.open(memory)
        except OSError as error:
            raise ConfigError(
                f"kv_connector direct needs /proc ({error}); use kv_connector nixl"
            ) from error
        return msgspec.msgpack.encode(Metadata(self._boot_id, memory.nonce, self._place))

    def add_peer(self, source: Source) -> None:
        """Map a peer's pool."""
        if source.generation in self._remotes:
            return
        try:
            metadata = msgspec.msgpack.decode(source.metadata, type=Metadata)
        except MALFORMED as error:
            raise TransferError(
                f"{source.engine_id} speaks another language than kv_connector direct"
            ) from error
        if metadata.boot_id != self._boot_id:
            raise TransferError(
                f"kv_connector direct needs one host, and {source.engine_id} runs on another one"
            )
        if type(metadata.place) is not type(self._place):
            raise TransferError(
                f"kv_connector direct needs both KV pools on CPUs or both on GPUs: ours is on "
                f"{self._region.device}, "
                f"that of {source.engine_id} on {source.region.device}"
            )
        pool = self._side.map(source, metadata.place)
        try:
            self._prove(source, pool, metadata.nonce)
        except TransferError:
            self._side.unmap(pool)
            raise
        self._remotes[source.generation] = _Remote(source, pool)

    def post_read(
        self, generation: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> object:
        """Begin to copy; `poll` goes on with it."""
        remote = self._remotes.get(generation)
        if remote is None:
            raise TransferError(f"peer of generation {generation} is not there any more")
        num_blocks = remote.source.region.num_blocks
        limits = (
            ("remote", remote_blocks, num_blocks),
            ("local", local_blocks, self._region.num_blocks),
        )
        for whose, blocks, limit in limits:
            if not all(0 <= block < limit for block in blocks):
                raise TransferError(
                    f"{whose} blocks {list(blocks)} reach outside a pool of {limit} blocks"
                )
        return self._side.start(remote.source, remote.pool, remote_blocks, local_blocks)

    def poll(self, handle: object) -> bool:
        """Raises nothing but what ends the process: a GPU that has failed fails for good."""
        return self._side.poll(handle)

    def peer_gone(self, generation: str) -> None:
        """What was mapped is still there, and read to its end."""

    def drop_peer(self, generation: str) -> None:
        """Unmap the pool of a peer that no READ in flight reads from."""
        remote = self._remotes.pop(generation, None)
        if remote is not None:
            self._side.unmap(remote.pool)

    def progress(self) -> None:
        """Peers that read from here need no help."""

    def close(self) -> None:
        """Unmap all pools. A READ in flight ends first, or not at all: nothing lands after this."""
        for generation in list(self._remotes):
            self.drop_peer(generation)

    def _prove(self, source: Source, pool: Any, nonce: bytes) -> None:
        """Process ids and handles are used again; the nonce is not. Where it lies also proves the
        size.
        """
        offset = nonce_offset(source.region.num_blocks * source.region.block_bytes)
        if self._side.nonce(pool, offset) != nonce:
            raise TransferError(
                f"what {source.engine_id} said is its KV pool is another's: it has ended or "
                f"restarted"
            )
