"""What the worker processes of one port have in common, in their parent: who is in the cluster, the limits of keys,
stored responses, the sum of all metrics. Serves no client, asks no node and starts no process (kvrelay/workers.py).

All state is in memory and changed by one event loop, so each question is answered by what was said before it. What a
worker says is in order; a response is therefore looked for again behind everything that its worker has said.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

from openai_api.response_store import ResponseStore
from router.admission.rate_limits import KeyLimits, Taken
from router.membership.heartbeats import hearing
from router.membership.kubernetes_watch import discovering
from router.membership.members import Members, NodeSpec, Source
from router.reload import Reread, read_again, static_nodes
from router.vllm.pings import hearing_pings
from router.workers.link import Link
from router.workers.messages import (
    Adapter,
    Added,
    Address,
    Begin,
    Begun,
    Died,
    Done,
    Drained,
    Emptied,
    Exposition,
    Family,
    Forget,
    Forgotten,
    FromParent,
    FromWorker,
    GiveBack,
    Heard,
    Keep,
    Legs,
    LegsOf,
    Listening,
    Look,
    Met,
    Names,
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
from router.workers.metric_sums import collected, lasting, summed, text_of
from wire.errors import ConfigError, NotFound, RequestError, Unavailable
from wire.outputs import Load
from wire.router_config import RouterConfig

__all__ = ["Parent", "share_of"]

_ASK_S = 2.0
"""Of one worker; it must be less than a worker waits for its parent."""
_SAMPLE_S = 10.0
"""A worker that is killed takes the counts of at most so long with it."""
BEAT_S = 1.0
BEAT_DEADLINE_S = 2.0
MISSED_BEATS = 5
"""So many in a row and a worker hangs: 15 s. One that was late once, as all are after a machine was suspended, does
not."""

_log = logging.getLogger("kvrelay.router")


@dataclass(eq=False, slots=True)
class _Peer:
    """One worker process."""

    index: int
    end: Callable[[], None]
    link: Link | None = None
    listening: bool = False
    held: dict[int, Taken] = field(default_factory=dict)
    """What its requests hold of the limits, by the number of the message that asked for it."""
    families: list[Family] = field(default_factory=list)
    """Its metrics when they were last asked for."""
    missed: int = 0
    """Beats that it has not answered, in a row."""


def share_of(config: RouterConfig, port: int) -> RouterConfig:
    """The configuration of one worker: what may wait and be open is divided, and only the parent hears nodes."""

    def divided(count: int) -> int:
        return math.ceil(count / config.workers)

    return replace(
        config,
        port=port,
        max_queue=divided(config.max_queue),
        max_connections=divided(config.max_connections),
        keys=tuple(replace(key, max_queue=divided(key.max_queue)) for key in config.keys),
        heartbeat_port=0,
        p2p_nccl_port=0,
        kubernetes_selector="",
        kubernetes_namespace="",
    )


class Parent:
    """See the module. A Listener: what sources tell it, all workers hear, also those that begin later."""

    def __init__(self, config: RouterConfig, port: int, reread: Reread | None = None) -> None:
        self._config, self._share = config, share_of(config, port)
        self._port, self._reread = port, reread
        self._members = Members()
        self._drained: dict[str, Drained] = {}
        self._addresses: dict[str, str] = {}
        self._limits, self._responses = KeyLimits(), ResponseStore()
        self._peers: dict[int, _Peer] = {}
        self._ended: list[Family] = []
        self.changed = asyncio.Event()
        """Set whenever a worker listens or has ended."""
        self.registry = registry = CollectorRegistry()
        """What is measured here, beside what the workers measure."""
        Gauge("kvrelay_router_workers", "Processes that serve.", registry=registry).set_function(self.listening)
        self.restarts = Counter("kvrelay_router_worker_restarts", "Processes that were replaced.", registry=registry)
        self._hung = Counter(
            "kvrelay_router_worker_hung",
            "Processes that were replaced because they did not answer their parent.",
            registry=registry,
        )
        ProcessCollector(registry=registry)  # this process's files run out, too
        self._members.tell(Source.STATIC, static_nodes(config))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hear nodes and look after the workers for the length of the block. Raises RequestError."""
        config = self._config
        async with (
            hearing(self, config.host, config.heartbeat_port, config.node_api_key),
            hearing_pings(self, config.host, config.p2p_nccl_port, lambda url: self._config.may_be_node(url)),
            discovering(self, config.kubernetes_selector, config.kubernetes_namespace, self.registry),
        ):
            tasks = [asyncio.create_task(self._sample_for_ever()), asyncio.create_task(self._beat_for_ever())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def reload(self) -> list[str]:
        """All workers take the configuration over that is read now: the settings that are new.

        Raises RequestError, ConfigError; then no worker has heard of it."""
        config, changed = read_again(self._config, self._reread)
        self._config, self._share = config, share_of(config, self._port)
        if {"prefill", "decode"} & set(changed):
            self.tell(Source.STATIC, static_nodes(config), time.monotonic())
        for peer in self._peers.values():
            if not peer.listening and peer.link is not None:
                peer.link.tell(TakeOver(self._share))
        await self._ask_all(TakeOver(self._share), Done)
        return changed

    def listening(self) -> int:
        """How many workers take connections."""
        return sum(peer.listening for peer in self._peers.values())

    def serves(self, index: int) -> bool:
        """Whether this worker takes connections."""
        return index in self._peers and self._peers[index].listening

    async def join(self, index: int, pair: socket.socket, end: Callable[[], None]) -> None:
        """A worker has been started; this is our end of its pair. `end` is called if it hangs: it kills the process."""
        peer = _Peer(index, end)
        peer.link = await Link.over(
            pair, FromWorker, lambda message, number: self._hear(peer, message, number), lambda: self._left(peer)
        )
        self._peers[index] = peer
        names = [Names(source, self._members.told(source)) for source in Source]
        peer.link.tell(
            Begin(self._share, index, self._config.workers, names, list(self._drained.values()), self._addresses)
        )

    # What sources say.

    def tell(self, source: Source, specs: Iterable[NodeSpec], now: float, gone: Collection[str] = ()) -> None:
        """See Listener."""
        names = Names(source, list(specs))
        self._forget(self._members.tell(source, names.specs).left)
        self._say(Told(names, list(gone)))

    def heard(self, url: str, load: Load, now: float, *, draining: bool) -> None:
        """See Listener."""
        self._say(Heard(url, load, draining))

    def note_p2p_address(self, url: str, address: str) -> None:
        """See Listener."""
        self._addresses[url] = address
        self._say(Address(url, address))

    # What workers say.

    def _hear(self, peer: _Peer, message: Any, number: int) -> Any:
        match message:
            case Take():
                return self._take(peer, message, number)
            case GiveBack():
                taken = peer.held.pop(message.number, None)
                if taken is not None:
                    self._limits.give_back(taken, message.used, time.monotonic())
            case Keep():
                self._responses.put(message.owner, message.response_id, message.stored)
            case Recall():
                return self._recall(peer, message.owner, message.response_id)
            case Forget():
                return self._delete(peer, message.owner, message.response_id)
            case Scrape():
                return self._exposition()
            case Legs():
                return self._legs(peer)
            case Look():
                return self._look(peer, message)
            case Added() | Removed() | Drained() | Adapter() | Emptied():
                return self._change(message)
            case Met() | Died() | Spared():
                self._say(message)
            case Reload():
                return self._reloaded()
            case Listening():
                peer.listening = True
                self._count()
        return None

    def _take(self, peer: _Peer, asked: Take, number: int) -> Took:
        told = self._limits.take(asked.key, asked.quota, asked.tokens, time.monotonic())
        if not isinstance(told, Taken):
            return Took(None, told)
        peer.held[number] = told
        return Took(told, None)

    async def _recall(self, peer: _Peer, owner: str, response_id: str) -> Recalled:
        for look_behind in (True, False):
            with suppress(NotFound):
                return Recalled(self._responses.get(owner, response_id))
            if look_behind:
                await self._ask_all(Sync(), Done, but=peer)
        return Recalled(None)

    async def _delete(self, peer: _Peer, owner: str, response_id: str) -> Forgotten:
        there = (await self._recall(peer, owner, response_id)).stored is not None
        with suppress(NotFound):
            self._responses.delete(owner, response_id)
        return Forgotten(there)

    async def _change(self, change: Added | Removed | Drained | Adapter | Emptied) -> Done:
        match change:
            case Added():
                self._members.add(Source.ADMIN, change.spec)
            case Removed():
                self._forget(self._members.remove([Source.ADMIN, Source.STATIC], change.url).left)
            case Drained(begin=True):
                self._drained[change.url] = change
            case Drained():
                self._drained.pop(change.url, None)
            case Adapter() | Emptied():
                pass  # who begins later asks the nodes first
        for peer in self._peers.values():
            if not peer.listening and peer.link is not None:
                peer.link.tell(change)
        await self._ask_all(change, Done)
        return Done()

    async def _reloaded(self) -> Reloaded:
        try:
            return Reloaded(await self.reload())
        except (ConfigError, RequestError) as why:
            return Reloaded([], why.message)

    async def _legs(self, peer: _Peer) -> LegsOf:
        legs: dict[str, int] = {}
        for _, told in await self._ask_all(Legs(), LegsOf, but=peer):
            for url, count in told.legs.items():
                legs[url] = legs.get(url, 0) + count
        return LegsOf(legs)

    async def _look(self, peer: _Peer, asked: Look) -> Seen:
        told = await self._ask_all(asked, Seen, but=peer)
        return Seen([worker for _, seen in told for worker in seen.workers])

    async def _exposition(self) -> Exposition:
        await self._sample()
        families = summed([*(peer.families for peer in self._peers.values()), self._ended, collected(self.registry)])
        return Exposition(text_of(families))

    async def _sample(self) -> None:
        for peer, told in await self._ask_all(Samples(), Sampled):
            if self._peers.get(peer.index) is peer:
                peer.families = told.families

    async def _sample_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            await self._sample()

    async def _beat_for_ever(self) -> None:
        """Find workers that hang (stopped, or in a loop without end): they hold connections and end none."""
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.gather(*(self._beat(peer) for peer in list(self._peers.values()) if peer.listening))

    async def _beat(self, peer: _Peer) -> None:
        assert peer.link is not None
        try:
            await peer.link.ask(Sync(), Done, BEAT_DEADLINE_S)
        except Unavailable:
            peer.missed += 1
        else:
            peer.missed = 0
        if peer.missed == MISSED_BEATS and peer.listening:
            _log.error("worker %d hangs and is killed: it has not answered %d times in a row", peer.index, peer.missed)
            self._hung.inc()
            peer.end()

    async def _ask_all(self, message: FromParent, kind: Any, but: _Peer | None = None) -> list[tuple[_Peer, Any]]:
        """The answers of those that answer. A worker that does not has it before it anyway, or has ended."""

        async def one(peer: _Peer, link: Link) -> tuple[_Peer, Any] | None:
            try:
                return peer, await link.ask(message, kind, _ASK_S)
            except Unavailable as why:
                _log.warning("worker %d: %s", peer.index, why.message)
            return None

        links = [(peer, peer.link) for peer in self._peers.values() if peer is not but and peer.listening]
        told = await asyncio.gather(*(one(peer, link) for peer, link in links if link is not None))
        return [each for each in told if each is not None]

    def _say(self, message: FromParent) -> None:
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.tell(message)

    def _forget(self, left: Iterable[str]) -> None:
        for url in left:
            self._drained.pop(url, None)
            self._addresses.pop(url, None)

    def _left(self, peer: _Peer) -> None:
        """A worker has ended, or cannot be heard: what it held is free, what it counted stays."""
        if self._peers.get(peer.index) is peer:
            del self._peers[peer.index]
        peer.listening = False
        now = time.monotonic()
        for taken in peer.held.values():
            self._limits.give_back(taken, taken.tokens, now)  # nobody knows better
        peer.held.clear()
        self._ended = summed([self._ended, lasting(peer.families)])
        peer.families = []
        self._count()

    def _count(self) -> None:
        self._say(Begun(self.listening()))
        self.changed.set()
