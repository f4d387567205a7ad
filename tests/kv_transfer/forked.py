"""Processes that run a script of ours without importing torch again: 1.8 s of CPU time for each of
some fifty.

One process imports what the scripts need, has no thread and no device, and forks itself for each of
them; it ends with the process that has started it. `Forked` is to its callers what a
`subprocess.Popen` with two pipes is.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

# Not NIXL: its libraries read their settings when they are loaded, and each process has its own.
IMPORTED = (
    "torch",
    "numpy",
    "pytest",
    "kvrelay.kernels.pool_memory",
    "kvrelay.kv_transfer.transfer_engine",
    "kvrelay.kv_transfer.direct",
    "kvrelay.kv_transfer.nccl",
)
START_S = 120.0


class Forked:
    """`argv`: a script and its arguments; `env`: all of its variables."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        try:
            door = _door()
            socket.send_fds(door, [json.dumps([argv, env]).encode()], [theirs_in, theirs_out])
            self.pid = int(door.recv(64))
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
        self._alive = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """None while it runs, then 0: how it ended is not known."""
        return 0 if self._ended(0.0) else None

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._alive, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)

    def _ended(self, within_s: float) -> bool:
        return bool(select.select([self._alive], [], [], within_s)[0])

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._alive)


@functools.cache
def _door() -> socket.socket:
    """To the process that forks itself, which is started when it is first wanted."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with theirs:
        subprocess.Popen([sys.executable, __file__], stdin=theirs, env=env)
    ours.settimeout(START_S)
    return ours


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.socket(fileno=os.dup(0)) as door:
        while True:
            asked, pipes, *_ = socket.recv_fds(door, 1 << 18, 2)
            if not asked:
                return
            pid = os.fork()
            if not pid:
                door.close()
                _run(*json.loads(asked), *pipes)
            for pipe in pipes:
                os.close(pipe)
            door.send(str(pid).encode())


def _run(argv: list[str], env: dict[str, str], stdin: int, stdout: int) -> None:
    """The script, as if it had been started."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, pipe in enumerate((stdin, stdout)):
            os.dup2(pipe, number)
            os.close(pipe)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        sys.stdout.flush()
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
