"""One worker process of a router that has several: it serves the port as a router alone does, and asks its parent for
what all have in common (router/workers/parent.py owns that).

Limits of keys are taken by a question to the parent, not from a lease of tokens: a lease would refuse a key with few
requests at once because another worker holds its last place. Only keys that have limits pay for it (40 us).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from openai_api.response_store import Responses, Stored, missing
from router.admission.poison import Poison
from router.admission.rate_limits import NO_LIMIT, Exceeded, Limits, Quota, Taken
from router.console.picture import WorkerSeen
from router.membership.members import NodeSpec, Source
from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.node import Node
from router.nodes.pool import Pool
from router.server import make_server
from router.shared import TakesOver, nobody
from router.workers.link import Link
from router.workers.listening import shared_port
from router.workers.messages import (
    Adapter,
    Added,
    Address,
    Answer,
    Begin,
    Begun,
    Died,
    Done,
    Drained,
    Emptied,
    Exposition,
    Forget,
    Forgotten,
    FromParent,
    GiveBack,
    Heard,
    Keep,
    Legs,
    LegsOf,
    Listening,
    Look,
    Met,
    Recall,
    Recalled,
    Reload,
    Reloaded,
    Removed,
    Sampled,
    Samples,
    Scrape,
    Seen,
    Spared,
    Sync,
    Take,
    TakeOver,
    Told,
    Took,
)
from router.workers.metric_sums import collected
from wire.errors import KvrelayError, RequestError, Unavailable
from wire.router_config import RouterConfig

__all__ = ["Worker", "serve_worker"]

_BEGIN_S = 30.0
_TICK_S = 0.005
_MAX_STORED_BYTES = 32 << 20

_log = logging.getLogger("kvrelay.router")


class _Held(Taken, frozen=True):
    number: int


class _LimitsOfParent:
    """The Limits of all workers."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def take(self, key: str, quota: Quota, tokens: int, now: float) -> Taken | Exceeded:
        """See Limits. By the parent's clock."""
        if quota == NO_LIMIT:
            return Taken(key, tokens, {})
        number = self._link.next_number()
        try:
            told = await self._link.ask(Take(key, quota, tokens), Took, number=number)
        except BaseException:
            # Whether it was taken or not: this comes behind the question.
            self._link.tell(GiveBack(number, None))
            raise
        if told.exceeded is not None:
            return told.exceeded
        assert told.taken is not None
        return _Held(key, tokens, told.taken.headers, number)

    def give_back(self, taken: Taken, used: int | None, now: float) -> None:
        """See Limits."""
        if isinstance(taken, _Held):
            self._link.tell(GiveBack(taken.number, used))


class _ResponsesOfParent:
    """The Responses of all workers."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def get(self, owner: str, response_id: str, param: str | None = None) -> Stored:
        """See Responses."""
        told = await self._link.ask(Recall(owner, response_id), Recalled)
        if told.stored is None:
            raise missing(response_id, param)
        return told.stored

    async def delete(self, owner: str, response_id: str) -> None:
        """See Responses."""
        if not (await self._link.ask(Forget(owner, response_id), Forgotten)).was_there:
            raise missing(response_id, None)

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """See Responses. What is very long is not kept."""
        if stored.size <= _MAX_STORED_BYTES:
            self._link.tell(Keep(owner, response_id, stored))


class Worker:
    """The Shared of one worker process; `hear` is given what the parent says."""

    def __init__(self, link: Link, begin: Begin, pool: Pool, doors: Doors, metrics: Metrics) -> None:
        self._link, self._begin, self._begun = link, begin, 0
        self._pool, self._doors, self._metrics = pool, doors, metrics
        self.limits: Limits = _LimitsOfParent(link)
        self.responses: Responses = _ResponsesOfParent(link)
        self.poison = Poison()
        self.leads = begin.index == 0
        self._take_over: TakesOver = nobody
        self._look: Callable[[float], WorkerSeen] | None = None
        now = time.monotonic()
        for names in begin.names:
            pool.tell(names.source, names.specs, now)
        for drained in begin.drained:
            self._drain(drained, now)
        for url, address in begin.addresses.items():
            pool.note_p2p_address(url, address)

    async def add(self, spec: NodeSpec) -> None:
        """See Shared."""
        await self._link.ask(Added(spec), Done)

    async def remove(self, url: str) -> None:
        """See Shared."""
        await self._link.ask(Removed(url), Done)

    async def drain(self, node: Node, *, begin: bool) -> None:
        """See Shared."""
        await self._link.ask(Drained(node.url, node.generation, begin), Done)

    async def adapter(self, node: Node, name: str, *, loaded: bool) -> None:
        """See Shared."""
        # Here at once: the others are told by way of the parent, this one too, and that may fail.
        self._pool.note_adapter(node, name, loaded=loaded, now=time.monotonic())
        try:
            await self._link.ask(Adapter(node.url, name, loaded), Done)
        except Unavailable as why:
            _log.warning("the other workers see adapter %r at their next health checks: %s", name, why.message)

    async def emptied(self, node: Node) -> None:
        """See Shared."""
        await self._link.ask(Emptied(node.url), Done)

    async def legs_elsewhere(self) -> dict[str, int]:
        """See Shared."""
        return (await self._link.ask(Legs(), LegsOf)).legs

    async def exposition(self) -> bytes:
        """See Shared."""
        return (await self._link.ask(Scrape(), Exposition)).text

    def met(self, prefill: Node, decode: Node, *, failed: bool) -> None:
        """See Shared."""
        self._link.tell(Met(prefill.url, decode.url, failed))

    def died(self, fingerprint: bytes, process: str) -> None:
        """See Shared."""
        self._link.tell(Died(fingerprint, process))

    def spared(self, fingerprint: bytes) -> None:
        """See Shared."""
        self._link.tell(Spared(fingerprint))

    def reloads(self, config: RouterConfig, take_over: TakesOver) -> None:
        """See Shared."""
        self._take_over = take_over

    async def reload(self) -> list[str]:
        """See Shared."""
        told = await self._link.ask(Reload(), Reloaded)
        if told.refused:
            raise RequestError(told.refused)
        return told.changed

    def shows(self, look: Callable[[float], WorkerSeen]) -> None:
        """See Shared."""
        self._look = look

    async def seen_elsewhere(self, since: float) -> list[WorkerSeen]:
        """See Shared."""
        return (await self._link.ask(Look(since), Seen)).workers

    def workers(self) -> dict[str, int] | None:
        """See Shared."""
        return {"index": self._begin.index, "listening": self._begun, "wanted": self._begin.count}

    def hear(self, message: Any, number: int) -> Answer | None:
        """Do what the parent says."""
        pool, now = self._pool, time.monotonic()
        match message:
            case Samples():
                return Sampled(collected(self._metrics.registry))
            case Legs():
                nodes = (*pool.nodes, *pool.leaving)
                return LegsOf({node.url: len(node.leases) for node in nodes if node.leases})
            case Look():
                return Seen([] if self._look is None else [self._look(message.since)])
            case Begun():
                self._begun = message.listening
            case Told():
                pool.tell(message.names.source, message.names.specs, now, message.gone)
            case Added():
                pool.add(message.spec, Source.ADMIN, now)
            case Removed():
                pool.remove(message.url, [Source.ADMIN, Source.STATIC], now)
            case Drained():
                self._drain(message, now)
            case Adapter():
                node = pool.find(message.url)
                if node is not None:
                    pool.note_adapter(node, message.name, loaded=message.loaded, now=now)
            case Emptied():
                node = pool.find(message.url)
                if node is not None:
                    pool.note_emptied(node)
            case Heard():
                pool.heard(message.url, message.load, now, draining=message.draining)
            case TakeOver():
                self._take_over(message.config)
            case Address():
                pool.note_p2p_address(message.url, message.address)
            case Met():
                prefill, decode = pool.find(message.prefill), pool.find(message.decode)
                if prefill is not None and decode is not None:
                    self._doors.met(prefill, decode, failed=message.failed, now=now)
            case Died():
                self.poison.died(message.fingerprint, message.process, now)
            case Spared():
                self.poison.spared(message.fingerprint)
            case Sync():
                pass
        return Done()

    def _drain(self, asked: Drained, now: float) -> None:
        node = self._pool.find(asked.url)
        if node is not None:
            # A worker that has just begun has not seen who was meant: another process than that one is not drained.
            node.generation = node.generation or asked.generation
            (self._pool.drain if asked.begin else self._pool.undrain)(node, now)


async def serve_worker(end: socket.socket) -> None:
    """Serve over this end of a pair what the parent at its other end says, until SIGTERM. Raises KvrelayError."""
    begin: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
    worker: Worker | None = None
    early: list[Any] = []

    def hear(message: Any, number: int) -> Answer | None:
        if worker is not None:
            return worker.hear(message, number)
        if begin.done():
            early.append(message)  # nothing is asked of a worker that does not listen yet
        else:
            begin.set_result(message)
        return None

    link = await Link.over(end, FromParent, hear, _orphaned)
    async with asyncio.timeout(_BEGIN_S):
        begun = await begin
    if not isinstance(begun, Begin):
        raise KvrelayError(f"the parent begins with {type(begun).__name__}")

    def make(pool: Pool, doors: Doors, metrics: Metrics) -> Worker:
        nonlocal worker
        worker = Worker(link, begun, pool, doors, metrics)
        return worker

    server = make_server(begun.config, make)
    assert worker is not None
    for message in early:
        worker.hear(message, 0)
    with shared_port(begun.config.host, begun.config.port) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        while not (server.started or serving.done()):
            await asyncio.sleep(_TICK_S)
        if server.started:
            link.tell(Listening())
        await serving


def _orphaned() -> None:
    """Without the parent there is nobody who would end this process."""
    _log.error("the parent of this worker is gone")
    os._exit(1)
