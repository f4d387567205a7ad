"""The process that looks after the workers of one port, and after nodes, roles and metrics.

It is a router that answers only operators, whose requests the workers forward to its Unix socket.
kvrelay/workers.py starts the workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as CounterMetric

from kvrelay.router.router import Reread, Router
from kvrelay.router.server import make_server
from kvrelay.router.state import Shared, WorkerStatus
from kvrelay.router.workers.messages import (
    ClusterState,
    LinkBroken,
    MetricFamily,
    WorkerReport,
    encode_message,
    read_message,
)
from kvrelay.router.workers.metrics import collected, lasting, summed, text_of
from kvrelay.wire.router_config import RouterConfig

__all__ = ["BACKLOG_BYTES", "HANGS_S", "SOCKET", "Parent", "config_of_worker", "worker_metrics"]

SOCKET = "parent"
HANGS_S = 15.0
"""A worker without a report for so long is replaced."""
_TICK_S = 0.1
_SETTLED_S = 1.0
BACKLOG_BYTES = 1 << 20
"""A worker with so much to read gets nothing more for now; then the newest."""

_log = logging.getLogger("kvrelay.router")


@dataclass(eq=False, slots=True)
class _Peer:
    index: int
    kill: Callable[[], None]
    writer: asyncio.StreamWriter
    silent: int = 0
    """Looks since its last report. Not seconds: this process may itself have stopped."""
    sent: int = -1
    report: WorkerReport | None = None
    """The newest; before the first the worker takes no connections."""
    status: WorkerStatus | None = None
    metrics: list[MetricFamily] = field(default_factory=list)
    deaths: int = 0


def config_of_worker(config: RouterConfig, port: int) -> RouterConfig:
    """Return a worker's configuration: limits are divided, and it hears no nodes itself."""

    def divided(count: int) -> int:
        return math.ceil(count / config.workers)

    return replace(
        config,
        port=port,
        prefill=(),
        decode=(),
        max_queue=divided(config.max_queue),
        max_connections=divided(config.max_connections),
        keys=tuple(
            replace(
                key,
                max_queue=divided(key.max_queue),
                max_running=divided(key.max_running),
                requests_per_minute=divided(key.requests_per_minute),
                tokens_per_minute=divided(key.tokens_per_minute),
            )
            for key in config.keys
        ),
        heartbeat_port=0,
        kubernetes_selector="",
        kubernetes_namespace="",
    )


def worker_metrics(
    registry: CollectorRegistry, listening: Callable[[], int]
) -> tuple[CounterMetric, CounterMetric]:
    """Return counts of restarts of workers, and of those that hung."""
    Gauge("kvrelay_router_workers", "Processes that serve.", registry=registry).set_function(
        listening
    )
    why = " because they reported nothing to their parent"
    return (
        CounterMetric(
            "kvrelay_router_worker_restarts", "Processes that were replaced.", registry=registry
        ),
        CounterMetric(
            "kvrelay_router_worker_hung", f"Processes that were replaced{why}.", registry=registry
        ),
    )


class Parent(Shared):
    serves = False

    def __init__(
        self, config: RouterConfig, port: int, folder: Path, reread: Reread | None = None
    ) -> None:
        """`folder`: only this process and its workers may enter it."""
        super().__init__()
        self._port = port
        self._server = make_server(config, self, reread, unix_socket=folder / SOCKET)
        self.router: Router = self._server.config.app.state.router  # type: ignore[union-attr]
        self._peers: dict[int, _Peer] = {}
        self._ended: list[MetricFamily] = []
        self._broadcast_due = False
        self._state = self._state_now(0)
        self._message = encode_message(self._state)
        registry = self.router.metrics.registry
        self.restarts, self.hung = worker_metrics(registry, self.listening)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        serving = asyncio.create_task(self._server.serve())
        ticking = asyncio.create_task(self._tick_for_ever())
        try:
            yield
        finally:
            self._server.should_exit = True
            ticking.cancel()
            await asyncio.gather(serving, ticking, return_exceptions=True)

    def listening(self) -> int:
        return sum(peer.report is not None for peer in self._peers.values())

    def serves_at(self, index: int) -> bool:
        return index in self._peers and self._peers[index].report is not None

    async def lead(self, index: int, pair: socket.socket, kill: Callable[[], None]) -> None:
        """Lead a started worker until it is gone, and keep its counts.

        `pair` is our end of its socket pair; `kill` is called if it hangs.
        """
        reader, writer = await asyncio.open_connection(sock=pair)
        peer = self._peers[index] = _Peer(index, kill, writer)
        self._broadcast()
        try:
            while True:
                self._take_report(peer, await read_message(reader, WorkerReport))
        except LinkBroken as why:
            _log.info("worker %d is gone: %s", index, why.message)
        finally:
            writer.close()
            if self._peers.get(index) is peer:
                del self._peers[index]
            self._ended = summed([self._ended, lasting(peer.metrics)])
            self._broadcast()

    def _take_report(self, peer: _Peer, report: WorkerReport) -> None:
        peer.report, peer.silent = report, 0
        if report.death is not None:
            peer.deaths += 1
            if not self._broadcast_due:  # a node that dies has many requests: one broadcast
                self._broadcast_due = True
                asyncio.get_running_loop().call_soon(self._broadcast)
            fingerprint, process = report.death
            if process:
                self.poison.died(fingerprint, process, time.monotonic())
            else:
                self.poison.spared(fingerprint)
        if report.status is not None:
            peer.status, peer.metrics = report.status, report.metrics

    def _state_now(self, version: int) -> ClusterState:
        router, now = self.router, time.monotonic()
        return ClusterState(
            version=version,
            listening=self.listening(),
            config=config_of_worker(router.config, self._port),
            members={source: list(specs.values()) for source, specs in router.pool.members.items()},
            nodes={
                node.url: (
                    node.generation if node.drain_asked else None,
                    sorted(node.adapters),
                    node.emptied,
                )
                for node in router.pool.nodes
            },
            poison=dict(self.poison.suspects(now)),
            deaths={peer.index: peer.deaths for peer in self._peers.values()},
        )

    def _broadcast(self) -> int:
        version, self._broadcast_due = self._state.version, False
        now = self._state_now(version)
        if now != self._state:
            version += 1
            self._state = msgspec.structs.replace(now, version=version)
            self._message = encode_message(self._state)
        for peer in self._peers.values():
            transport = peer.writer.transport
            if (
                peer.sent != version
                and not transport.is_closing()
                and transport.get_write_buffer_size() < BACKLOG_BYTES
            ):
                peer.writer.write(self._message)
                peer.sent = version
        return version

    async def settled(self) -> None:
        """Wait until all workers that read have what was changed here."""
        version, until = self._broadcast(), time.monotonic() + _SETTLED_S
        while any(peer.report and peer.report.version < version for peer in self._peers.values()):
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.005)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._broadcast()
                for peer in self._peers.values():
                    self._look_after(peer)
            except Exception:  # noqa: BLE001 - a mistake of ours must not end what workers live by
                _log.exception("the look after the workers failed")

    def _look_after(self, peer: _Peer) -> None:
        peer.silent += 1
        if peer.report is not None and peer.silent == math.ceil(HANGS_S / _TICK_S):
            _log.error("worker %d hangs and is killed: no report for %g s", peer.index, HANGS_S)
            self.hung.inc()
            peer.kill()

    def other_workers(self) -> Sequence[WorkerStatus]:
        return [peer.status for peer in self._peers.values() if peer.status is not None]

    def exposition(self, own: CollectorRegistry) -> bytes:
        of_workers = [peer.metrics for peer in self._peers.values()]
        return text_of(summed([*of_workers, self._ended, collected(own)]))

    def workers(self) -> dict[str, int] | None:
        return {"listening": self.listening(), "wanted": self.router.config.workers}
