"""The process that looks after the workers of one port, and after nodes, roles and metrics.

It is a router that answers only operators, whose requests the workers forward to its Unix socket.
There each worker asks ten times a second for what is new, and reports what it sees. Both are of one
installation, so their messages have no versions. kvrelay/workers.py starts the workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from kvrelay.router.background import repeat
from kvrelay.router.nodes.node import NodeSpec, Source
from kvrelay.router.request.failures import Suspect
from kvrelay.router.router import Reread, Router
from kvrelay.router.server import make_server
from kvrelay.router.state import Shared, WorkerStatus
from kvrelay.wire.errors import ConfigError, NotFound
from kvrelay.wire.router_config import KeyConfig, RouterConfig

__all__ = [
    "HANGS_S",
    "LARGEST",
    "POLL_S",
    "SOCKET",
    "ClusterState",
    "Parent",
    "WorkerReport",
    "config_of_worker",
    "lasting",
    "summed",
    "text_of",
    "worker_metrics",
]

SOCKET = "parent"
POLL_S = 0.1
"""Seconds between two reports of a worker."""
HANGS_S = 15.0
"""A worker without a report for so long is replaced."""
_SETTLED_S = 1.0

# Gauges of which the largest is taken; others count what a worker has, and are summed.
LARGEST = frozenset(
    {
        "kvrelay_router_node_up",
        "kvrelay_router_queue_depth",
        "kvrelay_router_breaker_state",
        "kvrelay_router_prefix_texts",
        "kvrelay_router_prefix_blocks",
        "kvrelay_router_role_use",
        "process_start_time_seconds",
        "process_open_fds",
        "process_max_fds",
    }
)

_log = logging.getLogger("kvrelay.router")


class ClusterState(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of all that a worker must know."""

    version: int
    listening: int
    config: RouterConfig
    """The configuration of one worker, with the port of all."""
    members: dict[Source, list[NodeSpec]]
    nodes: dict[str, tuple[bool, list[str]]]
    """A drain that only routers know of, and adapters, by address."""
    poison: dict[bytes, Suspect]


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    version: int
    """The version that it follows; 0: none yet, and it takes no connections."""
    deaths: list[tuple[bytes, str]] = []
    """Fingerprints of requests, and processes that died of them; empty: it was answered."""
    seen: tuple[WorkerStatus, str] | None = None
    """Once a second what it sees, and its metrics as text."""


@dataclass(eq=False, slots=True)
class _Peer:
    kill: Callable[[], None]
    silent: int = 0
    """Looks since its last report. Not seconds: this process may itself have stopped."""
    version: int = 0
    status: WorkerStatus | None = None
    metrics: str = ""


def config_of_worker(config: RouterConfig, port: int) -> RouterConfig:
    """Return a worker's configuration: limits are divided, and it hears no nodes itself."""

    def divided(of: RouterConfig | KeyConfig, *limits: str) -> dict[str, Any]:
        return {name: math.ceil(getattr(of, name) / config.workers) for name in limits}

    of_keys = "max_queue", "max_running", "requests_per_minute", "tokens_per_minute"
    return replace(
        config,
        port=port,
        prefill=(),
        decode=(),
        heartbeat_port=0,
        kubernetes_selector="",
        kubernetes_namespace="",
        keys=tuple(replace(key, **divided(key, *of_keys)) for key in config.keys),
        **divided(config, "max_queue", "max_connections"),
    )


def worker_metrics(
    registry: CollectorRegistry, listening: Callable[[], int]
) -> tuple[CounterMetric, CounterMetric]:
    """Return counts of restarts of workers, and of those that hung."""
    serving = Gauge("kvrelay_router_workers", "Processes that serve.", registry=registry)
    serving.set_function(listening)
    replaced = "Processes that were replaced"
    why = "because they reported nothing to their parent."
    return (
        CounterMetric("kvrelay_router_worker_restarts", f"{replaced}.", registry=registry),
        CounterMetric("kvrelay_router_worker_hung", f"{replaced} {why}", registry=registry),
    )


class Parent(Shared):
    serves = False
    first_checks_s = 5.0

    def __init__(
        self, config: RouterConfig, port: int, folder: Path, reread: Reread | None = None
    ) -> None:
        """`folder`: only this process and its workers may enter it."""
        super().__init__()
        self._port = port
        self._server = make_server(config, self, reread, unix_socket=folder / SOCKET)
        app: FastAPI = self._server.config.app  # type: ignore[assignment]
        app.add_route("/workers/{index:int}", self._take_report, methods=["POST"])
        self.router: Router = app.state.router
        self._peers: dict[int, _Peer] = {}
        self._ended: list[Metric] = []
        self._state = self._state_now(1)
        self._message = msgspec.msgpack.encode(self._state)
        self.restarts, self.hung = worker_metrics(self.router.metrics.registry, self.listening)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer workers and operators for the length of the block. Raises ConfigError."""
        serving = asyncio.create_task(self._server.serve())
        looking = asyncio.create_task(repeat(POLL_S, self._look))
        try:
            while not self._server.started:
                await asyncio.sleep(0.01)
                if serving.done():
                    raise ConfigError("the router's parent process cannot start; its log says why")
            yield
        finally:
            self._server.should_exit = True
            looking.cancel()
            await asyncio.gather(serving, looking, return_exceptions=True)

    def listening(self) -> int:
        return sum(map(self.serves_at, self._peers))

    def serves_at(self, index: int) -> bool:
        return index in self._peers and self._peers[index].version > 0

    def begin(self, index: int, kill: Callable[[], None]) -> None:
        """Take reports of a started worker; `kill` is called if it hangs."""
        self._peers[index] = _Peer(kill)

    def ended(self, index: int) -> None:
        """Forget a worker whose process has ended, and keep its counts."""
        if (peer := self._peers.pop(index, None)) is not None:
            self._ended = summed([self._ended, lasting(_families(peer.metrics))])
            self.restarts.inc()

    async def _take_report(self, request: Request) -> Response:
        peer = self._peers.get(request.path_params["index"])
        if peer is None:
            raise NotFound("this worker has ended")
        report = msgspec.msgpack.decode(await request.body(), type=WorkerReport)
        peer.version, peer.silent = report.version, 0
        for fingerprint, process in report.deaths:
            if process:
                self.poison.died(fingerprint, process, time.monotonic())
            else:
                self.poison.spared(fingerprint)
        if report.deaths:
            self._refresh()
        if report.seen is not None:
            peer.status, peer.metrics = report.seen
        return Response(b"" if report.version == self._state.version else self._message)

    def _state_now(self, version: int) -> ClusterState:
        pool = self.router.pool
        return ClusterState(
            version=version,
            listening=self.listening(),
            config=config_of_worker(self.router.config, self._port),
            members={source: list(specs.values()) for source, specs in pool.members.items()},
            nodes={node.url: (node.drain_asked, sorted(node.adapters)) for node in pool.nodes},
            poison=dict(self.poison.suspects(time.monotonic())),
        )

    def _refresh(self) -> int:
        now = self._state_now(self._state.version)
        if now != self._state:
            self._state = msgspec.structs.replace(now, version=now.version + 1)
            self._message = msgspec.msgpack.encode(self._state)
        return self._state.version

    async def settled(self) -> None:
        """Wait until all workers have what was changed here."""
        version, until = self._refresh(), time.monotonic() + _SETTLED_S
        while any(0 < peer.version < version for peer in self._peers.values()):
            if time.monotonic() > until:
                return
            await asyncio.sleep(0.005)

    async def _look(self) -> None:
        self._refresh()
        for index, peer in self._peers.items():
            peer.silent += 1
            if peer.version and peer.silent == math.ceil(HANGS_S / POLL_S):
                _log.error("worker %d hangs and is killed", index)
                self.hung.inc()
                peer.kill()

    def other_workers(self) -> Sequence[WorkerStatus]:
        return [peer.status for peer in self._peers.values() if peer.status is not None]

    def exposition(self, own: CollectorRegistry) -> bytes:
        told = [generate_latest(own).decode(), *(peer.metrics for peer in self._peers.values())]
        return text_of(summed([self._ended, *map(_families, told)]))

    def workers(self) -> dict[str, int] | None:
        return {"listening": self.listening(), "wanted": self.router.config.workers}


def _families(metrics: str) -> Iterable[Metric]:
    return text_string_to_metric_families(metrics)


def lasting(families: Iterable[Metric]) -> list[Metric]:
    return [family for family in families if family.type in ("counter", "histogram", "summary")]


def summed(families: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Return one family of each name; samples must have their labels in one order."""
    joined: dict[str, Metric] = {}
    values = defaultdict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]](dict)
    for family in chain.from_iterable(families):
        joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        known = values[family.name]
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            both = known.get(key, 0.0), sample.value
            known[key] = max(both) if family.name in LARGEST else sum(both)
    for name, family in joined.items():
        for (of, labels), value in values[name].items():
            family.add_sample(of, dict(labels), value)
    return list(joined.values())


def text_of(families: Iterable[Metric]) -> bytes:
    return generate_latest(SimpleNamespace(collect=lambda: families))
