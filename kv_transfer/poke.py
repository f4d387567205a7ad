"""Wakes a thread that polls zmq sockets: those are its own, but a socket pair can be written to by
others.
"""

from __future__ import annotations

import contextlib
import socket

import zmq

__all__ = ["Poke"]


class Poke:
    """Called from any thread it ends the poll; `take` and `close` are the polling thread's."""

    def __init__(self, poller: zmq.Poller) -> None:
        """Registers with the poller."""
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        poller.register(self._read, zmq.POLLIN)

    def __call__(self) -> None:
        # A full buffer means that the thread has been poked a few thousand times and is about to
        # look.
        with contextlib.suppress(BlockingIOError, OSError):
            self._write.send(b"\0")

    def take(self) -> None:
        """Forget what was poked."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(1 << 16)

    def close(self) -> None:
        """Later calls do nothing."""
        self._read.close()
        self._write.close()
