"""A child process of a node, from both ends: a zmq pair, and the config as JSON on its stdin."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from kvrelay.node.process import (
    PARENT_PID,
    crash_report,
    die_with_parent,
    exit_now,
    flush_log,
    freeze_imports,
    log_to_stderr,
    python_command,
)
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.engine_messages import EngineFailed
from kvrelay.wire.errors import KvrelayError

__all__ = ["REPORT_S", "RESTART_S", "STOP_DEADLINE_S", "Child", "run_child"]

log = logging.getLogger("kvrelay.node")

STOP_DEADLINE_S = 5.0
# A child's report may come after its end.
REPORT_S = 0.05
RESTART_S = 60.0
"""A process that ends so soon after it was started again gets no other."""

_Config = TypeVar("_Config")


@dataclass(slots=True)
class Child:
    """A process that ends with this one, and connects to a socket in `folder`."""

    process: asyncio.subprocess.Process
    socket: zmq.asyncio.Socket
    folder: str
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    async def start(cls, module: str, config: object, environ: Mapping[str, str]) -> Child:
        """Run a module's `main` with an endpoint as argument, and the config as JSON on stdin."""
        folder = tempfile.mkdtemp(prefix="kvrelay-")  # nobody else may enter it
        endpoint = f"ipc://{folder}/child"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.bind(endpoint)
        try:
            process = await asyncio.create_subprocess_exec(
                *python_command(module),
                endpoint,
                stdin=asyncio.subprocess.PIPE,
                env={**environ, **child_environ(), PARENT_PID: str(os.getpid())},
            )
        except BaseException:
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        return cls(process, socket, folder)

    def send(self, message: bytes) -> None:
        sent = cast("asyncio.Future[object]", self.socket.send(message))
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *work: Coroutine[Any, Any, None]) -> None:
        self.tasks = [asyncio.create_task(each) for each in work]

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.alive:
            self.process.kill()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_DEADLINE_S)
            except TimeoutError:
                log.error("process %d cannot be killed: its driver holds it", self.process.pid)
        self.socket.close()
        self.remove_folder()


def run_child(
    name: str, kind: type[_Config], run: Callable[[_Config, zmq.Socket[bytes]], None]
) -> NoReturn:
    """Run in the child; tell an error as EngineFailed."""
    die_with_parent()
    # Ctrl-C reaches the whole group, but the parent says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    freeze_imports()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    log_to_stderr(name, getattr(config, "log_format", ""))
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.set_hwm(0)
    socket.connect(sys.argv[1])
    try:
        run(config, socket)
    except Exception as why:
        report = crash_report(why)
        if not isinstance(why, KvrelayError):
            logging.getLogger(f"kvrelay.{name}").exception("%s", report)
        flush_log()  # the parent ends this process once it has the report
        socket.send(msgspec.msgpack.encode(EngineFailed(report)))
        socket.context.destroy()  # waits until it is sent
        exit_now(2 if isinstance(why, KvrelayError) else 1)
    socket.context.destroy()
    exit_now(0)  # tearing torch down takes 0.7 s
