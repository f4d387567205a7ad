"""`kvrelay router --workers N`: starts, restarts, drains and ends the worker processes of a router.

Run as a module it is one of the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from functools import partial
from pathlib import Path

import uvloop

from kvrelay.node.process import PARENT_PID, describe_exit, die_with_parent, log_to_stderr
from kvrelay.openai_api.tls import server_context
from kvrelay.router.router import Reread, reload_on_hangup
from kvrelay.router.server import settle
from kvrelay.router.transport.node_client import node_tls
from kvrelay.router.workers.parent import Parent
from kvrelay.router.workers.worker import serve_worker, shared_port
from kvrelay.supervisor import Backoff, ChildFailed
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.versions import RELEASE

__all__ = ["run_workers"]

_START_DEADLINE_S = 60.0
_STOP_AFTER_DRAIN_S = 15.0
_LOOK_S = 0.05

_log = logging.getLogger("kvrelay.router")


def run_workers(config: RouterConfig, reread: Reread | None = None) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code; SIGHUP reloads if `reread` is given.

    Raises ConfigError, RequestError, ChildFailed.
    """
    server_context(config)  # else each worker would say what is wrong
    node_tls(config)
    with (
        shared_port(config.host, config.port) as held,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(config, held.getsockname()[1], reread))


async def _run(config: RouterConfig, port: int, reread: Reread | None = None) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="kvrelay-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        parent = Parent(config, port, folder, reread)
        return await _serve(parent, config, port, folder, stop, reread)


async def _serve(
    parent: Parent,
    config: RouterConfig,
    port: int,
    folder: Path,
    stop: asyncio.Event,
    reread: Reread | None,
) -> int:
    if reread is not None:
        reload_on_hangup(parent.router.reload)
    stop_s = config.drain_deadline_s + _STOP_AFTER_DRAIN_S
    workers = [_Worker(parent, index, folder, stop_s) for index in range(config.workers)]
    async with parent.running():
        tasks = [asyncio.create_task(worker.keep()) for worker in workers]
        ready = asyncio.create_task(_ready(parent, config, port))
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({*tasks, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()  # raises: a worker is kept for as long as it gets ready at all
        finally:
            parent.router.ending = True
            ready.cancel()
            stopped.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(ready, stopped, *tasks, return_exceptions=True)
            await asyncio.gather(*(worker.end() for worker in workers))
    return 0


async def _ready(parent: Parent, config: RouterConfig, port: int) -> None:
    while parent.listening() < config.workers:
        await asyncio.sleep(_LOOK_S)
    host = f"[{config.host}]" if ":" in config.host else config.host
    _log.info(
        "%d workers serve http%s://%s:%d",
        config.workers,
        "s" if config.ssl_certfile else "",
        host,
        port,
    )


class _Worker:
    def __init__(self, parent: Parent, index: int, folder: Path, stop_s: float) -> None:
        self._parent, self._index, self._folder, self._stop_s = parent, index, folder, stop_s
        self._backoff = Backoff()
        self._process: Process | None = None

    async def keep(self) -> None:
        ready = False
        while True:
            began = time.monotonic()
            process = await self._start()
            ready = await self._was_ready(process, began) or ready
            code = await process.wait()
            self._parent.ended(self._index)
            lived_s = time.monotonic() - began
            if not ready:
                raise ChildFailed(
                    f"worker {self._index} ended ({describe_exit(code)}) before it served; its log says "
                    f"why"
                )
            delay_s = self._backoff.delay_s(lived_s)
            fate = (self._index, describe_exit(code), lived_s, delay_s)
            _log.error("worker %d ended (%s) after %.1f s; another one starts in %g s", *fate)
            await asyncio.sleep(delay_s)
            self._parent.restarts.inc()

    async def end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self._stop_s)
            except TimeoutError:
                _log.error(
                    "worker %d is killed: it has not ended %g s after SIGTERM",
                    self._index,
                    self._stop_s,
                )
                process.kill()
                await process.wait()

    async def _start(self) -> Process:
        # Also on the main thread: Linux sends the parent's death to the children of a *thread* that
        # ends.
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-u", "-m", "kvrelay.workers"),
            *(str(self._index), str(self._folder), RELEASE),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, PARENT_PID: str(os.getpid())},
        )
        self._parent.begin(self._index, partial(_kill, process))
        return process

    async def _was_ready(self, process: Process, began: float) -> bool:
        while not self._parent.serves_at(self._index):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LOOK_S)
                return self._parent.serves_at(self._index)
            if time.monotonic() - began > _START_DEADLINE_S:
                _log.error(
                    "worker %d is killed: it does not serve after %g s",
                    self._index,
                    _START_DEADLINE_S,
                )
                _kill(process)
        return True


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def main() -> None:
    """Run a worker process: `python -m kvrelay.workers INDEX FOLDER RELEASE`."""
    die_with_parent()
    signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # of a terminal, to all at once: the parent says what follows
    index, folder, release = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    log_to_stderr("router", worker=index)
    if release != RELEASE:  # the package was replaced under a running router
        _log.error(
            "this worker is of kvrelay %s and its parent of %s; restart the router",
            RELEASE,
            release,
        )
        sys.exit(2)
    settle()
    # Ctrl-C reaches all processes at once; uvicorn has drained before it is raised here.
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serve_worker(index, folder))


if __name__ == "__main__":
    main()
