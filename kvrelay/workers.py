"""`kvrelay router --workers N`: the parent of the workers and, run as a module, one of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from kvrelay.node.process import die_with_parent, log_to_stderr
from kvrelay.router.router import Reread, reload_on_hangup
from kvrelay.router.server import settle
from kvrelay.router.workers.parent import Parent
from kvrelay.router.workers.worker import serve_worker, shared_port
from kvrelay.supervisor import Child, ChildSpec, Supervisor, until_stopped
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.versions import RELEASE

__all__ = ["run_workers"]

_START_DEADLINE_S = 60.0
_STOP_AFTER_DRAIN_S = 15.0

_log = logging.getLogger("kvrelay.router")


def run_workers(config: RouterConfig, reread: Reread | None = None) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code; SIGHUP reloads if `reread` is given.

    Raises ConfigError, RequestError, ChildFailed.
    """
    with (
        shared_port(config.host, config.port) as held,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(config, held.getsockname()[1], reread))


async def _run(config: RouterConfig, port: int, reread: Reread | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="kvrelay-", ignore_cleanup_errors=True) as folder:
        parent = Parent(config, port, Path(folder), reread)
        command = sys.executable, "-P", "-u", "-m", "kvrelay.workers"
        workers = [
            ChildSpec(f"worker {at}", (*command, str(at), folder, RELEASE), "", None, os.environ)
            for at in range(config.workers)
        ]
        await until_stopped(_serve(parent, config, port, workers, reread))
    return 0


async def _serve(
    parent: Parent,
    config: RouterConfig,
    port: int,
    workers: Sequence[ChildSpec],
    reread: Reread | None,
) -> None:
    if reread is not None:
        reload_on_hangup(parent.router.reload)
    stop_s = config.drain_deadline_s + _STOP_AFTER_DRAIN_S

    async def serves(worker: ChildSpec) -> bool:
        return parent.serves_at(workers.index(worker))

    def began(worker: Child) -> None:
        parent.begin(workers.index(worker.spec), worker.give_up)

    def ended(worker: Child) -> None:
        parent.ended(workers.index(worker.spec))

    supervisor = Supervisor(serves, _log.warning, _START_DEADLINE_S, stop_s, began, ended)
    async with parent.running(), supervisor:
        try:
            await asyncio.gather(*(supervisor.start(worker).ready for worker in workers))
            url = replace(config, port=port).url_at(config.host)
            _log.info("%d workers serve %s", config.workers, url)
            await supervisor.watch()
        finally:
            parent.router.ending = True


def main() -> None:
    """Run a worker process: `python -m kvrelay.workers INDEX FOLDER RELEASE`."""
    die_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of pkill, to all: the parent says what follows
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
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_worker(index, folder))


if __name__ == "__main__":
    main()
