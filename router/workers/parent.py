"""The process that looks after the workers of one port: who is in the cluster, their configuration,
roles and metrics.

It is a router itself, which answers no completions: it hears and checks nodes, has them meet and
change their roles, and answers operators, whose requests the workers hand on to its Unix socket.
What follows for the workers goes out as a snapshot (router/workers/messages.py). Starts no process:
kvrelay/workers.py does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as CounterMetric

from kvrelay.router.reload import Reread
from kvrelay.router.router import Router
from kvrelay.router.server import make_server
from kvrelay.router.shared import Shared
from kvrelay.router.state import WorkerStatus
from kvrelay.router.workers.messages import Family, LinkBroken, Report, Snapshot, framed, received
from kvrelay.router.workers.metric_sums import collected, lasting, summed, text_of
from kvrelay.wire.router_config import RouterConfig

__all__ = ["BACKLOG_BYTES", "HANGS_S", "SOCKET", "Parent", "WorkerMetrics", "share_of"]

SOCKET = "parent"
"""The name of the parent's socket in the folder that it shares with its workers."""
HANGS_S = 15.0
"""A worker that reports nothing for so long is stopped, or in a loop without end: it is replaced."""
_TICK_S = 0.1
_SETTLED_S = 1.0
BACKLOG_BYTES = 1 << 20
"""Who has so much before it is told nothing further until it has read on; then the newest."""

_log = logging.getLogger("kvrelay.router")


@dataclass(eq=False, slots=True)
class _Peer:
    """One worker process."""

    index: int
    end: Callable[[], None]
    writer: asyncio.StreamWriter
    heard_at: float
    sent: int = -1
    report: Report | None = None
    """The last one; before the first it takes no connections."""
    seen: WorkerStatus | None = None
    families: list[Family] = field(default_factory=list)
    deaths: int = 0
    """That it has told of."""


def share_of(config: RouterConfig, port: int) -> RouterConfig:
    """Return the configuration of one worker: limits are divided, rounded up, and it hears no nodes
    itself.
    """

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
        p2p_nccl_port=0,
        kubernetes_selector="",
        kubernetes_namespace="",
    )


class WorkerMetrics:
    """What is measured of the workers themselves."""

    def __init__(self, registry: CollectorRegistry, listening: Callable[[], int]) -> None:
        Gauge("kvrelay_router_workers", "Processes that serve.", registry=registry).set_function(
            listening
        )
        about = "Processes that were replaced."
        self.restarts = CounterMetric("kvrelay_router_worker_restarts", about, registry=registry)
        about = "Processes that were replaced because they reported nothing to their parent."
        self.hung = CounterMetric("kvrelay_router_worker_hung", about, registry=registry)


class Parent(Shared):
    """A router process that has workers."""

    serves = False

    def __init__(
        self, config: RouterConfig, port: int, folder: Path, reread: Reread | None = None
    ) -> None:
        """`folder`: of this process, which its workers may enter and nobody else."""
        super().__init__()
        self._port = port
        self._server = make_server(config, self, reread, unix_socket=folder / SOCKET)
        self.router: Router = self._server.config.app.state.router  # type: ignore[union-attr]
        self._peers: dict[int, _Peer] = {}
        self._ended: list[Family] = []
        self._due = False
        """A broadcast is about to be made."""
        self._told = self._snapshot(0)
        self._frame = framed(self._told)
        self.metrics = WorkerMetrics(self.router.metrics.registry, self.listening)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look after nodes and workers for the length of the block."""
        serving = asyncio.create_task(self._server.serve())
        ticking = asyncio.create_task(self._tick_for_ever())
        try:
            yield
        finally:
            self._server.should_exit = True
            ticking.cancel()
            await asyncio.gather(serving, ticking, return_exceptions=True)

    def listening(self) -> int:
        """Count the workers that take connections."""
        return sum(peer.report is not None for peer in self._peers.values())

    def serves_at(self, index: int) -> bool:
        """Say whether this worker takes connections."""
        return index in self._peers and self._peers[index].report is not None

    async def hear(self, index: int, pair: socket.socket, end: Callable[[], None]) -> None:
        """Lead a worker that was started until it is gone, and keep what it has counted.

        `pair` is our end of its pair, and `end` kills it if it hangs.
        """
        reader, writer = await asyncio.open_connection(sock=pair)
        peer = self._peers[index] = _Peer(index, end, writer, time.monotonic())
        self._broadcast()
        try:
            while True:
                self._heard(peer, await received(reader, Report))
        except LinkBroken as why:
            _log.info("worker %d is gone: %s", index, why.message)
        finally:
            writer.close()
            if self._peers.get(index) is peer:
                del self._peers[index]
            self._ended = summed([self._ended, lasting(peer.families)])
            self._broadcast()

    def _heard(self, peer: _Peer, report: Report) -> None:
        began, peer.report, peer.heard_at = peer.report is None, report, time.monotonic()
        if report.death is not None:
            peer.deaths += 1
            fingerprint, process = report.death
            if process:
                self.poison.died(fingerprint, process, peer.heard_at)
            else:
                self.poison.spared(fingerprint)
        if report.seen is not None:
            peer.seen, peer.families = report.seen, report.families
        if began or (
            report.death is not None and not self._due
        ):  # a node that dies has many requests: one snapshot
            self._due = True
            asyncio.get_running_loop().call_soon(self._broadcast)

    def _snapshot(self, version: int) -> Snapshot:
        """Say what workers must know now."""
        router, now = self.router, time.monotonic()
        pool, nodes = router.pool, router.pool.nodes
        return Snapshot(
            version=version,
            listening=self.listening(),
            config=share_of(router.config, self._port),
            names={
                source: list(specs.values()) for source, specs in pool.members.by_source.items()
            },
            drained={node.url: node.generation for node in nodes if node.drain_asked},
            addresses={node.url: node.p2p_address for node in nodes if node.p2p_address},
            news=list(pool.events),
            warm_pairs=router.warm_ups.pairs(),
            poison=dict(self.poison.suspects(now)),
            heard={peer.index: peer.deaths for peer in self._peers.values()},
        )

    def _broadcast(self) -> int:
        """Send what is new to all who have not got it; return the version of what they will have
        then.
        """
        version, self._due = self._told.version, False
        now = self._snapshot(version)
        if now != self._told:
            version += 1
            self._told = msgspec.structs.replace(now, version=version)
            self._frame = framed(self._told)
        for peer in self._peers.values():
            transport = peer.writer.transport
            if (
                peer.sent != version
                and not transport.is_closing()
                and transport.get_write_buffer_size() < BACKLOG_BYTES
            ):
                peer.writer.write(self._frame)
                peer.sent = version
        return version

    async def settled(self) -> None:
        """Wait until all workers have what was changed here, as far as they read at all."""
        version, until = self._broadcast(), time.monotonic() + _SETTLED_S
        while any(peer.report and peer.report.version < version for peer in self._peers.values()):
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.005)

    async def _tick_for_ever(self) -> None:
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            # While this process was stopped or busy, it was not the workers that were silent.
            now, before = time.monotonic(), looked_at
            looked_at, late_s = now, max(0.0, now - before - _TICK_S)
            try:
                self._look(now, late_s)
            except Exception:  # noqa: BLE001 - a mistake of ours must not end what workers live by
                _log.exception("the look after the workers failed")

    def _look(self, now: float, late_s: float) -> None:
        """Tell the workers what is new, and end those that hang."""
        self._broadcast()
        for peer in self._peers.values():
            peer.heard_at += late_s
            if peer.report is not None and now - peer.heard_at > HANGS_S:
                _log.error(
                    "worker %d hangs and is killed: it has reported nothing for %g s",
                    peer.index,
                    HANGS_S,
                )
                self.metrics.hung.inc()
                peer.heard_at = math.inf
                peer.end()

    def running_elsewhere(self) -> Mapping[str, int]:
        """Count the legs of all workers, by the addresses of their nodes."""
        legs: Counter[str] = Counter()
        for peer in self._peers.values():
            if peer.report is not None:
                legs.update(peer.report.legs)
        return legs

    def other_workers(self) -> Sequence[WorkerStatus]:
        """Return what the workers saw when they last told."""
        return [peer.seen for peer in self._peers.values() if peer.seen is not None]

    def exposition(self, own: CollectorRegistry) -> bytes:
        """Write the metrics of all processes as those of one, also of workers that have ended."""
        of_workers = [peer.families for peer in self._peers.values()]
        return text_of(summed([*of_workers, self._ended, collected(own)]))

    def workers(self) -> dict[str, int] | None:
        """Count the workers."""
        return {"listening": self.listening(), "wanted": self.router.config.workers}
