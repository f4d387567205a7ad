"""Memory of another process of this host, mapped read-only: what a peer must be told, and how it is
opened safely.

The memory is a sealed memfd, opened as /proc/PID/fd/FD: that takes one user and one PID namespace.
Process ids are used again, so whoever maps looks in the memory itself for a proof that it is the
right one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from pathlib import Path

import msgspec

from kvrelay.wire.errors import TransferError

__all__ = ["HostFile", "mapped", "place_of"]


class HostFile(msgspec.Struct, frozen=True, tag="host"):
    """File descriptor `file` of process `pid`."""

    pid_namespace: int
    pid: int
    file: int


def place_of(file: int) -> HostFile:
    """Of a file descriptor of ours. Raises OSError without /proc."""
    return HostFile(_pid_namespace(), os.getpid(), file)


def mapped(place: HostFile, size: int, who: str, what: str) -> mmap.mmap:
    """The first `size` bytes of `what` of the peer `who`. Raises TransferError naming what is
    missing.
    """
    if place.pid_namespace != _pid_namespace():
        raise TransferError(
            f"kv_connector direct needs one PID namespace, and {who} runs in another one "
            f"(containers: docker run "
            "--pid, shareProcessNamespace in a pod)"
        )
    # The peer names what we open, so it must not be able to make us wait (a pipe) or fault (a file
    # that shrinks).
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
    """A plain file in memory that nobody can make shorter."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    try:
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file on a disk
        return False


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
