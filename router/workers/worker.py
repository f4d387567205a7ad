"""One worker process of a router that has several, serving as a router alone does.

Its parent tells it of the cluster, and answers operators.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from pathlib import Path

import aiohttp
import msgspec
import yarl
from fastapi import Request
from starlette.responses import Response

from kvrelay.router.guard import PEER_HEADER, peer_of
from kvrelay.router.router import Router
from kvrelay.router.server import make_server
from kvrelay.router.state import Shared
from kvrelay.router.workers.messages import (
    ClusterState,
    LinkBroken,
    WorkerReport,
    encode_message,
    read_message,
)
from kvrelay.router.workers.metrics import collected
from kvrelay.router.workers.parent import BACKLOG_BYTES, SOCKET
from kvrelay.wire.errors import ConfigError, Unavailable

__all__ = ["Worker", "serve_worker", "shared_port"]

_BEGIN_S = 30.0
_TICK_S = 0.005
_REPORT_S = 1.0
_NOTHING: tuple[None, list[str], int] = None, [], 0
_RESPONSES = "responses.sqlite"
_ORDER_S = 45.0  # a node may take 35 s to reset its prefix cache
_QUESTION_S = 20.0
_FORWARDED = ("authorization", "x-api-key", "content-type")
_RETURNED = ("content-type", "cache-control", "retry-after", "www-authenticate")

_log = logging.getLogger("kvrelay.router")


def shared_port(host: str, port: int) -> socket.socket:
    """Return a socket that shares its port; 0 takes a free one. Raises ConfigError."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("several workers need SO_REUSEPORT, which this system has not; use one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with contextlib.ExitStack() as undo:
            held = undo.enter_context(socket.socket(family, kind, protocol))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also in TIME_WAIT
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.bind(address)
            undo.pop_all()
    except OSError as why:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why.strerror}; choose another --host or --port"
        ) from why
    return held


class Worker(Shared):
    leads = False
    router: Router

    def __init__(self, index: int, folder: Path, writer: asyncio.StreamWriter) -> None:
        super().__init__(str(folder / _RESPONSES))
        self.poison.tell = lambda fingerprint, process: self.report((fingerprint, process))
        self._socket = str(folder / SOCKET)
        self._http: aiohttp.ClientSession | None = None
        self.forward = self._forward
        self.index, self._writer = index, writer
        self._state: ClusterState | None = None
        self._deaths = 0

    async def _forward(self, request: Request, body: bytes, deadline_s: float = 0.0) -> Response:
        # Returns the parent's answer. Raises Unavailable after the deadline.
        if self._http is None:
            connector = aiohttp.UnixConnector(self._socket)
            self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        deadline_s = deadline_s or (_QUESTION_S if request.method == "GET" else _ORDER_S)
        # Unchanged: encoded parts or dots must not make another path there.
        path, query = (
            request.scope[part].decode("latin-1") for part in ("raw_path", "query_string")
        )
        url = yarl.URL.build(
            scheme="http", host="parent", path=path, query_string=query, encoded=True
        )
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        headers[PEER_HEADER] = peer_of(request)
        try:
            asking = self._http.request(request.method, url, data=body, headers=headers)
            async with asyncio.timeout(deadline_s), asking as answer:
                kept = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
                return Response(await answer.read(), answer.status, kept)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as why:
            raise Unavailable("the router's own processes have lost each other; try again") from why

    def workers(self) -> dict[str, int] | None:
        assert self._state is not None
        wanted = self.router.config.workers
        return {"index": self.index, "listening": self._state.listening, "wanted": wanted}

    def apply(self, state: ClusterState) -> None:
        """Take over what the parent says, and leave the rest as this process sees it."""
        router, pool, now = self.router, self.router.pool, time.monotonic()
        # A new process asks the nodes itself what has become of them.
        before = self._state or msgspec.structs.replace(state, members={})
        self._state = state
        for source, specs in state.members.items():
            if before.members.get(source) != specs:
                pool.set_members(source, specs, now)
        for node in pool.nodes:
            meant, adapters, emptied = state.nodes.get(node.url, _NOTHING)
            _, had, were = before.nodes.get(node.url, _NOTHING)
            if adapters != had:
                pool.note_adapters(node, adapters, now)
            if emptied > were:
                pool.note_emptied(node)
            if meant is None and node.drain_asked:
                pool.undrain(node, now)
            elif meant is not None and not node.drain_asked and node.generation in ("", meant):
                node.generation = meant
                pool.drain(node, now)
        if state.deaths.get(self.index, 0) >= self._deaths:  # else the newest are not in it
            self.poison.take_over(state.poison)
        if before.config != state.config:
            router.take_over(state.config)

    def report(self, death: tuple[bytes, str] | None = None) -> None:
        self._deaths += death is not None
        report = WorkerReport(0 if self._state is None else self._state.version, death)
        if death is None and self._writer.transport.get_write_buffer_size() < BACKLOG_BYTES:
            router = self.router
            status, metrics = router.console.status(), collected(router.metrics.registry)
            report = msgspec.structs.replace(report, status=status, metrics=metrics)
        self._writer.write(encode_message(report))

    async def follow(self, reader: asyncio.StreamReader) -> None:
        while True:
            self.apply(await read_message(reader, ClusterState))
            self.report()

    async def report_for_ever(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(_REPORT_S)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


async def serve_worker(end: socket.socket, index: int, folder: Path) -> None:
    """Serve until SIGTERM; `end` is connected to the parent. Raises KvrelayError."""
    reader, writer = await asyncio.open_connection(sock=end)
    async with asyncio.timeout(_BEGIN_S):
        state = await read_message(reader, ClusterState)
    worker = Worker(index, folder, writer)
    server = make_server(state.config, worker)
    worker.router = server.config.app.state.router  # type: ignore[union-attr]
    worker.apply(state)
    with shared_port(state.config.host, state.config.port) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        while not (server.started or serving.done()):
            await asyncio.sleep(_TICK_S)
        beside = {
            asyncio.create_task(worker.follow(reader)),
            asyncio.create_task(worker.report_for_ever()),
        }
        await asyncio.wait({serving, *beside}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # without the parent nobody would end this process
            failures = [task.exception() for task in beside if task.done()]
            for why in failures:
                if not isinstance(why, LinkBroken):
                    _log.error("a worker ends, because of an error of its own", exc_info=why)
            _log.error("the parent of this worker is gone")
            os._exit(1)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, worker.close(), return_exceptions=True)
        await serving
