"""Proxies between the processes: the network, as far as TCP shows one.

One process (`python -m tests.soak.chaos.proxies`) has a port for each pair of processes and port.
The shim leads connections there, so each node goes by its own name. A cut link passes nothing and
keeps what it was given, a lost packet is a chunk that comes a retransmission later, a reset ends
both connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

__all__ = ["Bad", "Proxies"]

_CHUNK = 1 << 16
_AGAIN_S = 0.2
"""The shortest time after which TCP sends again."""
_LOOK_S = 0.01
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Bad:
    """A fault of the network between two processes; of all others if `other` is empty."""

    kind: str
    """cut, resets, loss or delay."""
    name: str
    other: str = ""
    way: str = "both"
    """in: what comes to `name`; out: what it sends."""
    amount: float = 0.0
    """Share that is lost, or seconds of the delay."""


class Proxies:
    """The proxies of a run, in a process of their own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._links: dict[str, dict[int, int]] = {}

    async def join(self, names: Mapping[str, Sequence[int]]) -> None:
        """Open a port for each process and each port of another one.

        Raises OSError.
        """
        listeners, told = list[socket.socket](), []
        for name in names:
            for other, ports in names.items():
                for port in ports if other != name else ():
                    listeners.append(socket.create_server(("127.0.0.1", 0), backlog=512))
                    told.append((name, other, port, listeners[-1].fileno()))
                    self._links.setdefault(name, {})[port] = listeners[-1].getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.chaos.proxies"],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno() for listener in listeners],
        )
        self._write(told)
        for listener in listeners:
            listener.close()

    def links(self, name: str) -> dict[int, int]:
        """Return the port of the proxy for each port to which a process connects."""
        return self._links.get(name, {})

    def tell(self, what: Literal["begin", "end"], bad: Bad) -> None:
        self._write((what, bad))

    async def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await asyncio.to_thread(self._process.wait, 10)

    def _write(self, what: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(what) + b"\n")
        self._process.stdin.flush()


class _Links:
    def __init__(self) -> None:
        self.bad: list[Bad] = []
        self._open: dict[tuple[str, str], set[asyncio.StreamWriter]] = {}
        self._rng = random.Random(1)

    def change(self, what: str, bad: Bad) -> None:
        if what == "end":
            self.bad.remove(bad)
            return
        self.bad.append(bad)
        if bad.kind == "resets":
            for pair, writers in self._open.items():
                if _concerns(bad, *pair) or _concerns(bad, *reversed(pair)):
                    for writer in list(writers):
                        _reset(writer)

    def now(self, kind: str, source: str, target: str) -> float:
        """How much of this there is on the way; 0 if none."""
        return max(
            (
                bad.amount or 1.0
                for bad in self.bad
                if bad.kind == kind and _concerns(bad, source, target)
            ),
            default=0.0,
        )

    async def pass_on(
        self,
        names: tuple[str, str],
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        dialler, target = names
        while self.now("cut", dialler, target) or self.now("cut", target, dialler):
            await asyncio.sleep(_LOOK_S)
        try:
            if self.now("resets", *names) or self.now("resets", *reversed(names)):
                raise ConnectionRefusedError
            there = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK)
        except OSError:
            _reset(writer)
            return
        both = {writer, there[1]}
        self._open.setdefault(names, set()).update(both)
        try:
            await asyncio.gather(
                self._copy(reader, there[1], dialler, target),
                self._copy(there[0], writer, target, dialler),
            )
        finally:
            self._open[names] -= both
            for each in both:
                each.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str
    ) -> None:
        try:
            while came := await reader.read(_CHUNK):
                if self.bad:
                    await self._wait(source, target)
                writer.write(came)
                await writer.drain()
            if self.bad:
                await self._wait(source, target)
            writer.write_eof()
        except OSError:
            _reset(writer)

    async def _wait(self, source: str, target: str) -> None:
        if late_s := self.now("delay", source, target):
            await asyncio.sleep(late_s)
        again_s = _AGAIN_S
        while self._rng.random() < self.now("loss", source, target):
            await asyncio.sleep(again_s)
            again_s *= 2
        while self.now("cut", source, target):
            await asyncio.sleep(_LOOK_S)


def _concerns(bad: Bad, source: str, target: str) -> bool:
    inward = target == bad.name and bad.other in ("", source) and bad.way in ("both", "in")
    return inward or (
        source == bad.name and bad.other in ("", target) and bad.way in ("both", "out")
    )


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 22)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    links = _Links()
    for name, other, port, number in msgspec.json.decode(await lines.readline()):

        def made(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            names: tuple[str, str] = (name, other),
            port: int = port,
        ) -> Any:
            return links.pass_on(names, port, reader, writer)

        await asyncio.start_server(made, sock=socket.socket(fileno=number), limit=_CHUNK)
    while line := await lines.readline():
        links.change(*msgspec.json.decode(line, type=tuple[str, Bad]))


if __name__ == "__main__":
    asyncio.run(_serve())
