"""`kvrelay` on this machine for the time of a benchmark: a cluster (`up`) or one aggregated node
(`serve`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import aiohttp

from kvrelay.node.process import PARENT_PID

__all__ = ["child", "family", "free_ports", "running", "wait_until_healthy"]

START_DEADLINE_S = 180
STOP_DEADLINE_S = 60
_PORTS = 18_000, 32_000
_ROOT = Path(__file__).parents[1]


@contextmanager
def running(command: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Start `kvrelay COMMAND FLAGS` on a free port; yield its URL and process id once it is
    healthy.

    Raises RuntimeError if it ends at start, TimeoutError if it does not get healthy in time; then
    its log is printed.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "kvrelay.cli", command, f"--port={port}", *flags]
    with tempfile.TemporaryFile() as log:
        try:
            with child(argv, log, dict(os.environ)) as process:
                wait_until_healthy(url, process, START_DEADLINE_S)
                yield url, process.pid
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode()[-3000:])
            raise


@contextmanager
def child(
    argv: Sequence[str], log: IO[bytes], env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in the root of the repository, and end it and all of its group, whatever
    happens.
    """
    process = subprocess.Popen(
        argv,
        stdout=log,
        stderr=log,
        env={**env, PARENT_PID: str(os.getpid())},
        cwd=_ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], within_s: float) -> None:
    """Return when its /health answers 200. Raises RuntimeError if the process ends before, and
    TimeoutError.
    """
    asyncio.run(asyncio.wait_for(_healthy(f"{url}/health", process), within_s))


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback for this process and its children, in pairs of neighbours.

    Nobody listens on them now, and no other process gets them from here while this one lives. None
    is of those that the system gives to outgoing connections: one of these may have a port again
    before it is listened on.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(*_PORTS, 2)  # tests seed the other one
        with (
            socket.socket(socket.AF_UNIX) as claim,
            socket.socket() as first,
            socket.socket() as second,
            suppress(OSError),
        ):
            claim.bind(f"\0kvrelay port {port}")
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            claim.detach()  # stays open
            found += [port, port + 1]
    return found[:count]


def family(pid: int) -> list[int]:
    """A process and all below it; those that end meanwhile may be in it."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                with suppress(OSError):
                    found += [int(child) for child in (thread / "children").read_text().split()]
    return found


async def _healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError(f"it ended with code {process.returncode} before it was healthy")
