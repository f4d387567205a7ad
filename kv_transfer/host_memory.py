"""Memory that processes of one host share: how a peer opens it safely, and leases in it.

The memory is a sealed memfd, opened as /proc/PID/fd/FD, within one user and PID namespace. Process
ids are reused, so whoever maps looks in the memory itself for a proof.

A source keeps each lease's epoch in a word there, until the step loop hears that the lease has
ended. A reader that finds the epoch after its last byte has the right bytes; otherwise (leases
share words) it asks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.wire.errors import TransferError

__all__ = ["HeldWords", "HostFile", "LeaseWords", "mapped", "place_of"]


class HostFile(msgspec.Struct, frozen=True, tag="host"):
    """A file descriptor `file` of process `pid`."""

    pid_namespace: int
    pid: int
    file: int


def place_of(file: int) -> HostFile:
    """Return how peers find our file descriptor. Raises OSError without /proc."""
    return HostFile(_pid_namespace(), os.getpid(), file)


def mapped(place: HostFile, size: int, who: str, what: str) -> mmap.mmap:
    """Map the first `size` bytes of `what` of the peer `who`. Raises TransferError."""
    if place.pid_namespace != _pid_namespace():
        raise TransferError(
            f"kv_connector direct needs one PID namespace, and {who} runs in another one "
            "(containers: docker run --pid, shareProcessNamespace in a pod)"
        )
    # The peer's file must not make us wait (a pipe) or fault (a file that shrinks).
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        file = os.open(f"/proc/{place.pid}/fd/{place.file}", flags)
    except PermissionError as error:
        raise TransferError(
            f"kv_connector direct needs one user, and {who} runs as another one"
        ) from error
    except OSError as error:
        raise TransferError(
            f"{who} has ended: process {place.pid} has no such memory ({error})"
        ) from error
    try:
        if not _is_sealed(file) or os.fstat(file).st_size < size:
            raise TransferError(
                f"what {who} said is its {what} is not sealed memory of {size} bytes"
            )
        return mmap.mmap(file, size, prot=mmap.PROT_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise TransferError(f"the {what} of {who} cannot be mapped: {error}") from error
    finally:
        os.close(file)


def _is_sealed(file: int) -> bool:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    try:
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file on a disk
        return False


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


# 512 KiB. Leases with equal epochs modulo this share a word; the younger has it.
_WORDS = 1 << 16
_WORD_BYTES = 8
_GENERATION_BYTES = 32


class LeaseWords:
    """A source's held leases. Readers are told `place`; None without shared memory."""

    def __init__(self, generation: str) -> None:
        # Not before the engine has been imported, which sees to it that `kernels` is ours.
        from kvrelay.kernels.pool_memory import sealed_memory

        self.place: HostFile | None = None
        self._words = memoryview(bytearray(_WORDS * _WORD_BYTES)).cast("Q")
        with suppress(AttributeError, OSError, ValueError):
            size = _GENERATION_BYTES + _WORDS * _WORD_BYTES
            self._file, memory = sealed_memory("kvrelay-leases", size)
            memory[:_GENERATION_BYTES] = generation.encode()
            self._words = memoryview(memory)[_GENERATION_BYTES:].cast("Q")
            self.place = place_of(self._file)

    def begin(self, epoch: int) -> None:
        self._words[epoch % _WORDS] = epoch

    def end(self, epoch: int) -> None:
        if self._words[epoch % _WORDS] == epoch:
            self._words[epoch % _WORDS] = 0

    def close(self) -> None:
        self._words[:] = memoryview(bytes(_WORDS * _WORD_BYTES)).cast("Q")
        if self.place is not None:
            self.place = None
            os.close(self._file)


class HeldWords:
    def __init__(self, place: HostFile, generation: str, engine_id: str) -> None:
        """Map it. Raises TransferError if it is invisible from here, or another's."""
        memory = mapped(
            place, _GENERATION_BYTES + _WORDS * _WORD_BYTES, engine_id, "table of leases"
        )
        if memory[:_GENERATION_BYTES] != generation.encode():
            raise TransferError(f"what {engine_id} said is its table of leases is another's")
        self._words = memoryview(memory)[_GENERATION_BYTES:].cast("Q")

    def held(self, lease: LeaseId) -> bool:
        """Return True if the source holds the lease now; False says nothing."""
        return bool(self._words[lease.epoch % _WORDS] == lease.epoch != 0)
