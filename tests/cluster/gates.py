"""What a test may do to a cluster's connections: cut them, and refuse legs in a node's name.

A `Gate` stands between the router and a node's HTTP port. Control channels between nodes cannot be
stood between (a ticket names the node's own port), so `cut_connections` shuts the sockets of the
process that holds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import socket
import threading
from pathlib import Path

_REFUSAL = b'{"error": {"message": "refused by the test", "type": "server_error"}}'
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: "
    b"close\r\ncontent-length: "
)
_PIDFD_GETFD = 438  # the same number on every architecture


class Gates:
    """One thread for all gates."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def before(self, port: int) -> Gate:
        """A gate in front of this port of the loopback."""
        return asyncio.run_coroutine_threadsafe(self._open(port), self.loop).result(5)

    async def _open(self, port: int) -> Gate:
        gate = Gate(self.loop, port)
        server = await asyncio.start_server(gate.pass_on, "127.0.0.1", 0)
        gate.port = server.sockets[0].getsockname()[1]
        return gate

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


class Gate:
    """Passes bytes on. `cut` and `refuse_next` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, behind: int) -> None:
        self.port = 0
        self._loop, self._behind = loop, behind
        self._open: set[asyncio.StreamWriter] = set()
        self.refuses = 0

    def cut(self) -> None:
        """Drop all connections that are open now."""
        self._loop.call_soon_threadsafe(
            lambda: [writer.transport.abort() for writer in list(self._open)]
        )

    def refuse_next(self) -> None:
        """Answer the next completion with a 503."""
        self.refuses += 1

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._behind)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, there[1]}
        try:
            await asyncio.gather(
                self._copy(reader, there[1], writer), self._copy(there[0], writer, None)
            )
        finally:
            for each in (writer, there[1]):
                self._open.discard(each)
                each.close()

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        asker: asyncio.StreamWriter | None,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if asker is not None and self.refuses and data.startswith(b"POST /v1/"):
                    self.refuses -= 1
                    asker.write(_ANSWER + str(len(_REFUSAL)).encode() + b"\r\n\r\n" + _REFUSAL)
                    asker.close()
                    break
                writer.write(data)
                await writer.drain()
        writer.close()


def family(pid: int) -> list[int]:
    """A process and its children, of all of its threads."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def can_cut() -> bool:
    """Whether this machine lets us take the sockets of our own children."""
    with socket.socket() as probe:
        taken = _take(os.getpid(), probe.fileno())
        if taken is not None:
            os.close(taken)
        return taken is not None


def cut_connections(pid: int, port: int) -> int:
    """Shut each connection that this process has to a port of the loopback; how many there were."""
    inodes = set()
    # zmq's connections are of IPv6 sockets, also where their addresses are of IPv4.
    tables = [
        Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")
    ]
    for line in itertools.chain(*tables):
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port and fields[3] == "01":
            inodes.add(f"socket:[{fields[9]}]")
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes and (taken := _take(pid, int(link.name))) is not None:
                with socket.socket(fileno=taken) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _take(pid: int, number: int) -> int | None:
    """A copy of a file descriptor of another process; None if we may not."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        taken = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    return taken if taken >= 0 else None
