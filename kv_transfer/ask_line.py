"""The short way of an ask: a datagram from whoever asks straight to the thread of the source's pair.

Over the control socket an ask passes four threads, and to wake each takes 50 us or more, half a millisecond in all. A
datagram may be lost, or be too large, or a firewall may be in its way: so every ask is sent over the control socket as
well, has a number, and is heard once. Refuses to know what is asked.

Who may ask: a datagram is signed (keyed BLAKE2b) by the pair's name, 16 random bytes that only its two ends know, for
it travels over the control socket alone, encrypted. What it says can be read on its way, as the KV itself can.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
from typing import Any

__all__ = ["MAX_SAID_BYTES", "Ear", "Mouth"]

# Some 2,000 blocks.
MAX_SAID_BYTES = 8 << 10
SIGNATURE_BYTES = 16
# Datagrams that are heard before anything else is done: strangers can send them, too.
BURST = 16


def _signature(key: bytes, said: bytes) -> bytes:
    return hashlib.blake2b(said, key=key, digest_size=SIGNATURE_BYTES).digest()


def _key(name: bytes) -> bytes:
    return hashlib.blake2b(name).digest()


def _numeric(address: str, port: int) -> tuple[int, Any]:
    """Family and socket address. Raises OSError for a name: to look one up may take seconds."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
    return family, where


class Ear:
    """The source's end: `wait` and `heard` are called from one thread, `ring` from any."""

    def __init__(self, address: str, name: bytes) -> None:
        """Listens at a port of this address of this machine, a number. Raises OSError."""
        family, where = _numeric(address, 0)
        self._key = _key(name)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind(where)
        except OSError:
            self._socket.close()
            raise
        self._where = self._socket.getsockname()
        self.address, self.port = address, int(self._where[1])

    def wait(self, timeout_s: float) -> bytes | None:
        """What is said next, if it is within so many seconds and nobody rings before."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError):
            return self._understood(self._socket.recv(SIGNATURE_BYTES + MAX_SAID_BYTES + 1))
        return None

    def heard(self) -> list[bytes]:
        """What has been said since, without waiting; not all of it, if it is much."""
        self._socket.settimeout(0)
        said = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(BURST):
                if frame := self._understood(self._socket.recv(SIGNATURE_BYTES + MAX_SAID_BYTES + 1)):
                    said.append(frame)  # noqa: PERF401 - what was heard before there was no more counts
        return said

    def ring(self) -> None:
        """End a `wait`, or the next one."""
        with contextlib.suppress(OSError):  # full: then there is something to hear; or closed
            self._socket.sendto(b"", self._where)

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()

    def _understood(self, datagram: bytes) -> bytes | None:
        signature, said = datagram[:SIGNATURE_BYTES], datagram[SIGNATURE_BYTES:]
        if not said or not hmac.compare_digest(signature, _signature(self._key, said)):
            return None
        return said


class Mouth:
    """The reader's end, for one thread at a time."""

    def __init__(self, address: str, port: int, name: bytes) -> None:
        """Where the source's ear is; the address is a number. Raises OSError, or OverflowError for no port."""
        family, where = _numeric(address, port)
        self._key = _key(name)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.connect(where)
        except (OSError, OverflowError):
            self._socket.close()
            raise

    def say(self, frame: bytes) -> None:
        """Perhaps it is heard."""
        if len(frame) <= MAX_SAID_BYTES:
            with contextlib.suppress(OSError):
                self._socket.send(_signature(self._key, frame) + frame)

    def close(self) -> None:
        """Say no more."""
        self._socket.close()
