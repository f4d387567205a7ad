"""One worker process of a router that has several, serving as a router alone does.

Its parent tells it of the cluster, and answers operators.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from pathlib import Path

import aiohttp
import msgspec
import yarl
from fastapi import Request
from prometheus_client import generate_latest
from starlette.responses import Response

from kvrelay.openai_api.json_body import read_body
from kvrelay.router.admin import ADAPTER_PATHS
from kvrelay.router.guard import PEER_HEADER, peer_of
from kvrelay.router.router import Router
from kvrelay.router.server import make_server, stop_on_signals
from kvrelay.router.state import Shared
from kvrelay.router.workers.parent import POLL_S, SOCKET, ClusterState, Parent, WorkerReport
from kvrelay.wire.errors import ConfigError, Unavailable
from kvrelay.wire.router_config import RouterConfig

__all__ = ["Worker", "serve_worker", "shared_port"]

_TICK_S = 0.005
_SEEN_S = 1.0
_RESPONSES = "responses.sqlite"
_READ_S = 10.0
_ORDER_S = 45.0  # a node may take 35 s to reset its prefix cache
_FORWARDED = ("authorization", "x-api-key")
_RETURNED = ("content-type", "cache-control", "retry-after")

_log = logging.getLogger("kvrelay.router")


def shared_port(host: str, port: int) -> socket.socket:
    """Return a socket that shares its port; 0 takes a free one. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        held = socket.socket(family, kind, protocol)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also in TIME_WAIT
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.bind(address)
        except OSError:
            held.close()
            raise
    except OSError as why:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why.strerror}; choose another --host or --port"
        ) from why
    return held


class Worker(Shared):
    leads = False
    first_checks_s = Parent.first_checks_s
    router: Router

    def __init__(self, index: int, folder: Path) -> None:
        super().__init__(str(folder / _RESPONSES))
        self.index = index
        self.poison.tell = lambda *death: self._deaths.append(death)
        # Two, so that no crowd of operators keeps a report waiting.
        self._reports, self._orders = (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(folder / SOCKET)),
                timeout=aiohttp.ClientTimeout(),
            )
            for _ in range(2)
        )
        self._deaths: list[tuple[bytes, str]] = []
        self._state = ClusterState(0, 0, RouterConfig(), {}, {}, {})
        self._seen_at = 0.0

    async def forward(self, request: Request) -> Response:
        # Returns the parent's answer. Raises KvrelayError, Unavailable after the deadline.
        config, deadline_s = self.router.config, _ORDER_S
        if request.url.path in ADAPTER_PATHS:
            deadline_s = config.request_deadline_s + _READ_S
        body = b""
        if request.method == "POST":  # GET /metrics wants no key, and gets no memory
            body = await read_body(request, config.max_body_bytes, _READ_S)
        # Unchanged: encoded parts or dots must not make another path there.
        path, query = (request.scope[part].decode() for part in ("raw_path", "query_string"))
        url = yarl.URL(f"http://parent{path}?{query}", encoded=True)
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        headers[PEER_HEADER] = peer_of(request)
        try:
            asking = self._orders.request(request.method, url, data=body, headers=headers)
            async with asyncio.timeout(deadline_s), asking as answer:
                kept = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
                return Response(await answer.read(), answer.status, kept)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as why:
            raise Unavailable("the router's own processes have lost each other; try again") from why

    def workers(self) -> dict[str, int] | None:
        listening, wanted = self._state.listening, self.router.config.workers
        return {"index": self.index, "listening": listening, "wanted": wanted}

    async def report(self) -> ClusterState | None:
        """Report to the parent; return its snapshot if that is new. Raises ClientError, OSError."""
        deaths, self._deaths, seen = self._deaths, [], None
        version, now = self._state.version, time.monotonic()
        if version and now >= self._seen_at + _SEEN_S:
            self._seen_at = now
            metrics = generate_latest(self.router.metrics.registry).decode()
            seen = self.router.status(), metrics
        asking = self._reports.post(
            f"http://parent/workers/{self.index}",
            data=msgspec.msgpack.encode(WorkerReport(version, deaths, seen)),
            raise_for_status=True,
        )
        async with asking as answer:
            told = await answer.read()
        return msgspec.msgpack.decode(told, type=ClusterState) if told else None

    def apply(self, state: ClusterState) -> None:
        """Take over what the parent says, and leave the rest as this process sees it."""
        router, pool, now = self.router, self.router.pool, time.monotonic()
        before, self._state, self._seen_at = self._state, state, 0.0
        for source, specs in state.members.items():
            if before.members.get(source) != specs:
                pool.set_members(source, specs, now)
        for node in pool.nodes:
            told = drained, adapters = state.nodes[node.url]
            if told == before.nodes.get(node.url):
                continue
            pool.note_adapters(node, adapters, now)
            if drained != node.drain_asked:
                (pool.drain if drained else pool.undrain)(node, now)
        if not self._deaths:  # else they are not in it
            self.poison.take_over(state.poison)
        if before.config != state.config:
            router.take_over(state.config)

    async def follow(self) -> None:
        while True:
            if state := await self.report():
                self.apply(state)
            else:
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        await self._reports.close()
        await self._orders.close()


async def serve_worker(index: int, folder: Path) -> None:
    """Serve until SIGTERM. Raises KvrelayError."""
    worker = Worker(index, folder)
    state = await worker.report()
    assert state is not None
    server = make_server(state.config, worker)
    worker.router = server.config.app.state.router  # type: ignore[union-attr]
    worker.apply(state)
    stop_on_signals(server, signal.SIGINT, signal.SIGTERM)
    with shared_port(state.config.host, state.config.port) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        while not (server.started or serving.done()):
            await asyncio.sleep(_TICK_S)
        following = asyncio.create_task(worker.follow())
        await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # without the parent nobody would end this process
            _log.error("a worker ends: it has lost its parent", exc_info=following.exception())
            os._exit(1)
        following.cancel()
        await asyncio.gather(following, worker.close(), return_exceptions=True)
        await serving
