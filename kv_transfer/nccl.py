"""The NCCL backend: two-rank communicators between pairs of nodes with GPUs.

Its methods post jobs, look at results and never wait. One thread has the control socket
(kv_transfer/nccl_control.py), and each pair has one, where communicators may block
(kv_transfer/nccl_pairs.py). Bytes travel as NCCL sends them: not encrypted, between addresses that
NCCL chooses (NCCL_SOCKET_IFNAME).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq

from kvrelay.kv_transfer.backend import Source, check_blocks
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.nccl_control import PairControl
from kvrelay.kv_transfer.nccl_library import NcclLibrary
from kvrelay.kv_transfer.nccl_pairs import Address, Ask, Terms, Transfer, encode
from kvrelay.kv_transfer.staging import Budget, StagedPool
from kvrelay.wire.errors import ConfigError, PeerLost, TransferError
from kvrelay.wire.frames import MALFORMED

__all__ = ["NcclBackend"]

# A pair has three slices of staging. 64 MiB take 190 us over NVLink, twice what the host needs to
# copy and to launch a slice; larger ones are not faster, and smaller ones leave the wire idle.
SLICE_BYTES = 64 << 20
# All pairs of a node together: 7 on a GPU.
MEMORY_CAP_BYTES = 2 << 30


class NcclBackend:
    """A `TransferBackend` over NCCL."""

    helps_readers = False  # its own threads do

    def __init__(
        self,
        region: PoolRegion,
        host: str,
        meet_s: float,
        patience_s: float,
        slice_bytes: int = SLICE_BYTES,
        memory_cap_bytes: int = MEMORY_CAP_BYTES,
        nccl: NcclLibrary | None = None,
    ) -> None:
        """`host` is an address of this machine that peers reach.

        A pair gets `meet_s` seconds to be made, and each slice `patience_s`; then the peer counts
        as stopped. Tests give another `nccl`, and need no GPU.
        """
        self._region = region
        self._host = host
        self._meet_s, self._patience_s = meet_s, patience_s
        self._slice_bytes = slice_bytes
        self._nccl = nccl
        self.budget = Budget(memory_cap_bytes)
        self._sources: dict[str, Source] = {}  # by generation

    def prepare(self) -> None:
        """Load NCCL and compile the kernels. Raises ConfigError without a GPU, NCCL or CURVE."""
        if not zmq.has("curve"):
            raise ConfigError(
                "kv_connector nccl needs a libzmq with CURVE; take pyzmq from a wheel"
            )
        nccl = self._nccl or NcclLibrary(_gpu(self._region.device), self._patience_s)
        pool = StagedPool(self._region)
        pool.compile()
        self._terms = Terms(
            pool, nccl, self.budget, self._slice_bytes, self._meet_s, self._patience_s
        )

    def open(self) -> bytes:
        self._control = PairControl(self._host, self._terms)
        return msgspec.msgpack.encode(self._control.address)

    def add_peer(self, source: Source) -> None:
        """Dial a peer's control socket. The pair is made at the first read."""
        if source.generation in self._sources:
            return
        try:
            address = msgspec.msgpack.decode(source.metadata, type=Address)
        except MALFORMED as error:
            raise TransferError(
                f"{source.engine_id} does not hand KV over by NCCL: set one kv_connector"
            ) from error
        self._sources[source.generation] = source
        self._control.dial(source.generation, address)

    def post_read(
        self, generation: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> Transfer:
        source = self._sources.get(generation)
        if source is None:
            raise TransferError(f"peer of generation {generation} is not there any more")
        check_blocks("remote", remote_blocks, source.region.num_blocks)
        check_blocks("local", local_blocks, self._region.num_blocks)
        try:
            encode(
                Ask(bytes(16), list(remote_blocks), source.part.remote_start, source.part.num_bytes)
            )
        except ValueError as error:
            raise TransferError(
                f"{len(remote_blocks)} blocks are too many to ask for at once: {error}"
            ) from error
        transfer = Transfer(remote_blocks, local_blocks, source.part)
        self._control.read(generation, transfer)
        return transfer

    def poll(self, handle: object) -> bool:
        """Return True when all is in. Raises PeerLost alone: from then on nothing lands."""
        assert isinstance(handle, Transfer)
        if handle.error is not None:
            raise PeerLost(handle.error.message) from handle.error
        return handle.done

    def peer_gone(self, generation: str) -> None:
        """Do nothing: the control socket tells the same."""

    def drop_peer(self, generation: str) -> None:
        if self._sources.pop(generation, None) is not None:
            self._control.hang_up(generation)

    def progress(self) -> None:
        """Raise RuntimeError if the control thread has ended."""
        if self._control.broken is not None:
            raise RuntimeError(
                f"the NCCL backend's control thread has ended: {self._control.broken}"
            )

    def close(self) -> None:
        """Hang up everywhere. A communicator that hangs keeps its staging, never the pool."""
        self._control.close()


def _gpu(device: str) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise ConfigError(
            f"kv_connector nccl needs a GPU, and the KV pool is on {device}; take nixl or direct"
        )
    return int(number)
