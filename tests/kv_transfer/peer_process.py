"""An object in a process of its own, for tests that stop and kill it.

Processes are forked from one that has imported torch, which takes 1.8 s of CPU time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvrelay.wire.transfer import Ticket

_CONTEXT = multiprocessing.get_context("forkserver")
# Not NIXL: its libraries read their settings when they are loaded, and each process has its own.
_CONTEXT.set_forkserver_preload(
    ["torch", "numpy", "kvrelay.kv_transfer.transfer_engine", "kvrelay.kv_transfer.nccl"]
)


class PeerProcess:
    """The parent's end of a process that makes an object, and calls its methods by name."""

    def __init__(self, make: Callable[..., object], *arguments: Any, **env: str) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        variables = {**os.environ, **env}
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, variables, make, arguments))
        self.process.start()
        theirs.close()
        self.pid = self.process.pid or 0

    def ask(self, path: str, *arguments: Any) -> Any:
        """The value of this attribute there, or of a call of it."""
        self._pipe.send((path, *arguments))
        assert self._pipe.poll(90.0), f"no answer to {path}"
        return self._pipe.recv()

    def offer(self, request_id: str, blocks: list[int]) -> Ticket:
        ticket: Ticket = self.ask("engine.offer", request_id, blocks, 1)
        return ticket

    def events(self, count: int, within_s: float) -> list[Any]:
        """Wait for events of an engine there; fewer if they do not come."""
        got: list[Any] = []
        until = time.monotonic() + within_s
        while len(got) < count and time.monotonic() < until:
            got += self.ask("engine.events")
            time.sleep(0.01)
        return got

    def stop(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        self.process.kill()
        self.process.join(10)


@contextlib.contextmanager
def peer_process(make: Callable[..., object], *arguments: Any, **env: str) -> Iterator[PeerProcess]:
    peer = PeerProcess(make, *arguments, **env)
    try:
        yield peer
    finally:
        peer.kill()


def _serve(pipe: Connection, env: dict[str, str], make: Callable[..., object], rest: Any) -> None:
    os.environ.clear()
    os.environ.update(env)
    target = make(*rest)
    with contextlib.suppress(EOFError):
        while True:
            path, *arguments = pipe.recv()
            found = attrgetter(path)(target)
            pipe.send(found(*arguments) if callable(found) else found)
