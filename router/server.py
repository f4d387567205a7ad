"""The router's process: one uvicorn server on uvloop."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn
import uvloop

from kvrelay.openai_api.connections import connection_class
from kvrelay.openai_api.json_body import return_large_blocks
from kvrelay.openai_api.tls import server_context
from kvrelay.router.relay import ClientConnection
from kvrelay.router.router import Reread, Router, reload_on_hangup
from kvrelay.router.serve import RouterApp
from kvrelay.router.state import Shared
from kvrelay.router.transport.node_client import node_tls
from kvrelay.wire.router_config import RouterConfig

__all__ = ["make_server", "run", "serve", "settle", "stop_on_signals"]

# Above the idle time after which OpenAI clients close a kept connection: we never do so first.
_KEEP_CONNECTION_S = 75


def settle() -> None:
    """Have the interpreter of a process that only routes do less.

    The cyclic collector took 9 % of the time and found next to nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    return_large_blocks()
    # Facts that no log line names, but that each record would ask the system for.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    setattr(logging, "_srcfile", None)  # noqa: B010 - as the logging module's own page on speed has it


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # see stop_on_signals

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        router: Router = self.config.app.state.router  # type: ignore[union-attr]
        router.ending = True
        await super().shutdown(sockets)


def make_server(
    config: RouterConfig,
    shared: Shared | None = None,
    reread: Reread | None = None,
    unix_socket: Path | None = None,
) -> uvicorn.Server:
    """Return a uvicorn server that is not started. Raises ConfigError.

    On a Unix socket it speaks plain HTTP.
    """
    context = server_context(config) if unix_socket is None else None
    node_tls(config)  # raises
    served = uvicorn.Config(
        RouterApp(config, shared, reread),
        uds=None if unix_socket is None else str(unix_socket),
        host=config.host,
        port=config.port,
        loop="uvloop",
        # Workers are no crowd, and one that is refused ends.
        http=connection_class(
            config.max_connections if unix_socket is None else sys.maxsize, of=ClientConnection
        ),
        ws="none",
        proxy_headers=False,  # nobody asks where a client is
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_CONNECTION_S,
        timeout_graceful_shutdown=math.ceil(config.drain_deadline_s),
    )
    served.load()
    served.ssl = context  # uvicorn's own options say less of what is wrong
    return _Server(served)


def stop_on_signals(server: uvicorn.Server, *numbers: signal.Signals) -> None:
    for number in numbers:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(number, server.handle_exit, number, None)


async def serve(
    config: RouterConfig,
    listening: Sequence[socket.socket] | None = None,
    reread: Reread | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, on given sockets or the configured address.

    SIGHUP reloads the configuration if there is a file, else it ends the router, too.
    """
    server = make_server(config, reread=reread)
    # SIGHUP: a terminal is closed, unless there is something to reload.
    stop_on_signals(server, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if reread is not None:
        reload_on_hangup(server.config.app.state.router.reload)  # type: ignore[union-attr]
    await server.serve(sockets=None if listening is None else list(listening))


def run(config: RouterConfig, reread: Reread | None = None) -> int:
    settle()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, reread=reread))
    return 0
