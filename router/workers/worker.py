"""One worker process of a router that has several: it serves the port as a router alone does.

What it must know of the cluster its parent tells it (router/workers/parent.py), and what operators
ask of it the parent answers. Limits of keys are divided among the workers; stored responses are in
a file that all have.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path

import msgspec

from kvrelay.router.membership.warm_up import NO_PAIRS
from kvrelay.router.nodes.node import NodeEvent
from kvrelay.router.router import Router
from kvrelay.router.server import make_server
from kvrelay.router.shared import Shared
from kvrelay.router.workers.forwarding import Forwarding
from kvrelay.router.workers.listening import shared_port
from kvrelay.router.workers.messages import LinkBroken, Report, Snapshot, framed, received
from kvrelay.router.workers.metric_sums import collected
from kvrelay.router.workers.parent import BACKLOG_BYTES, SOCKET
from kvrelay.wire.config import Role

__all__ = ["Worker", "serve_worker"]

_BEGIN_S = 30.0
_TICK_S = 0.005
_REPORT_S = 1.0
_RESPONSES = "responses.sqlite"

_log = logging.getLogger("kvrelay.router")


class Worker(Shared):
    """A router process that answers requests beside others."""

    leads = False
    router: Router
    """Set before the first snapshot is applied."""

    def __init__(self, index: int, folder: Path, writer: asyncio.StreamWriter) -> None:
        super().__init__(str(folder / _RESPONSES))
        self.poison.tell = lambda fingerprint, process: self.report((fingerprint, process))
        self.forward = self.forwarding = Forwarding(folder / SOCKET)
        self.index, self._writer = index, writer
        self._known: Snapshot | None = None
        self._deaths = 0

    def workers(self) -> dict[str, int] | None:
        """Say which worker this is, and count all."""
        assert self._known is not None
        return {
            "index": self.index,
            "listening": self._known.listening,
            "wanted": self.router.config.workers,
        }

    def apply(self, told: Snapshot) -> None:
        """Take over what the parent says. What this process has not been told it leaves as it is."""
        router, pool, node_health, now = (
            self.router,
            self.router.pool,
            self.router.node_health,
            time.monotonic(),
        )
        # A process that begins has its configuration, and asks nodes itself what has become of
        # them.
        before = self._known or msgspec.structs.replace(told, names={}, warm_pairs=NO_PAIRS)
        self._known = told
        for source, specs in told.names.items():
            if before.names.get(source) != specs:
                pool.set_members(source, specs, now)
        for url, address in told.addresses.items():
            pool.note_p2p_address(url, address)
        newest = before.news[-1].number if before.news else 0
        for news in told.news:
            if news.number > newest:
                self._hear(news, now)
        for node in pool.nodes:
            meant = told.drained.get(node.url)
            if meant is None and node.drain_asked:
                pool.undrain(node, now)
            elif meant is not None and not node.drain_asked and node.generation in ("", meant):
                node.generation = meant
                pool.drain(node, now)
        self.warm_pairs = told.warm_pairs
        for pair in set(told.warm_pairs[1]) - set(
            before.warm_pairs[1]
        ):  # each failure once; that they have met, their legs will show
            prefill, decode = map(pool.find, pair[:2])
            if prefill is not None and decode is not None:
                node_health.probed(prefill, decode, failed=True, now=now)
        if (
            told.heard.get(self.index, 0) >= self._deaths
        ):  # else the parent has not heard of the last ones
            self.poison.take_over(told.poison)
        if before.config != told.config:
            router.take_over(told.config)

    def _hear(self, news: NodeEvent, now: float) -> None:
        pool, node = self.router.pool, self.router.pool.find(news.url)
        match news.what:
            case "ended":
                pool.note_process_ended(news.url, now)
            case _ if node is None:
                pass
            case "emptied":
                pool.note_emptied(node)
            case "drains":
                pool.note_draining(node, now)
            case "flips":
                pool.note_role_change(node, Role(news.word), now)
            case "loaded" | "unloaded":
                pool.note_adapter(node, news.word, loaded=news.what == "loaded", now=now)

    def report(self, death: tuple[bytes, str] | None = None, *, whole: bool = False) -> None:
        """Tell the parent what is seen here; the `whole` of it, or what is needed at once."""
        self._deaths += death is not None
        router = self.router
        legs = {
            node.url: len(node.leases)
            for node in (*router.pool.nodes, *router.pool.leaving)
            if node.leases
        }
        report = Report(0 if self._known is None else self._known.version, legs, death)
        if whole and self._writer.transport.get_write_buffer_size() < BACKLOG_BYTES:
            seen, families = router.console.status(), collected(router.metrics.registry)
            report = msgspec.structs.replace(report, seen=seen, families=families)
        self._writer.write(framed(report))

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Apply each snapshot as it comes. Raises LinkBroken."""
        while True:
            self.apply(await received(reader, Snapshot))
            self.report()

    async def report_for_ever(self) -> None:
        """Tell the parent all that is seen here, once in a while."""
        while True:
            self.report(whole=True)
            await asyncio.sleep(_REPORT_S)


async def serve_worker(end: socket.socket, index: int, folder: Path) -> None:
    """Serve over this end of a pair what the parent at its other end says, until SIGTERM. Raises
    KvrelayError.
    """
    reader, writer = await asyncio.open_connection(sock=end)
    async with asyncio.timeout(_BEGIN_S):
        begin = await received(reader, Snapshot)
    worker = Worker(index, folder, writer)
    server = make_server(begin.config, worker)
    worker.router = server.config.app.state.router  # type: ignore[union-attr]
    worker.apply(begin)
    with shared_port(begin.config.host, begin.config.port) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        while not (server.started or serving.done()):
            await asyncio.sleep(_TICK_S)
        beside = {
            asyncio.create_task(worker.follow(reader)),
            asyncio.create_task(worker.report_for_ever()),
        }
        await asyncio.wait({serving, *beside}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # without the parent there is nobody who would end this process
            for failed in (
                task
                for task in beside
                if task.done() and not isinstance(task.exception(), LinkBroken)
            ):
                _log.error(
                    "a worker ends, because of an error of its own", exc_info=failed.exception()
                )
            _log.error("the parent of this worker is gone")
            os._exit(1)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, worker.forwarding.close(), return_exceptions=True)
        await serving
