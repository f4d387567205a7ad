"""Nodes that announce themselves over UDP; one not heard for LOST_AFTER_S is no longer named."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvrelay.router.background import running_task
from kvrelay.router.nodes.node import NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.errors import KvrelayError, RequestError
from kvrelay.wire.heartbeat import LOST_AFTER_S, MAX_SKEW_S, Heartbeat, NodeState, opened

__all__ = ["AnnouncedNodes", "hear_heartbeats"]

# A cluster has thousands at most, and memory must not pay for mistakes.
MAX_NODES = 10_000
_EXPIRE_S = 0.25
_COMPLAIN_S = 10.0

_log = logging.getLogger("kvrelay.router")


@dataclass(slots=True)
class _Heard:
    sent_at: float
    at: float  # monotonic
    spec: NodeSpec | None  # None while the node is not there


class AnnouncedNodes:
    def __init__(self, key: str) -> None:
        self._key = key
        self._heard: dict[str, _Heard] = {}
        self.changed = False  # specs() differs

    def add(self, message: bytes, unix_now: float, now: float) -> Heartbeat | None:
        """Return what a message says; None if it is out of date. Raises KvrelayError."""
        beat = opened(message, self._key, unix_now)
        spec = NodeSpec(beat.url, beat.role, beat.model)
        known = self._heard.get(spec.url)
        if known is not None and beat.sent_at <= known.sent_at:
            return None
        if known is None and len(self._heard) >= MAX_NODES:
            raise RequestError(
                f"{MAX_NODES} nodes have announced themselves; {spec.url} is one too many"
            )
        there = None if beat.state is NodeState.LEAVING else spec
        self.changed |= there != (known.spec if known is not None else None)
        self._heard[spec.url] = _Heard(beat.sent_at, now, there)
        return beat

    def expire(self, now: float) -> None:
        for heard in self._heard.values():
            if heard.spec is not None and now - heard.at > LOST_AFTER_S:
                _log.warning(
                    "%s node %s was not heard for %.1f s",
                    heard.spec.role,
                    heard.spec.url,
                    now - heard.at,
                )
                heard.spec, self.changed = None, True
        # Kept for as long as an old message could be played again.
        for url in [
            url
            for url, heard in self._heard.items()
            if not heard.spec and now - heard.at > 2 * MAX_SKEW_S
        ]:
            del self._heard[url]

    def specs(self) -> list[NodeSpec]:
        return [heard.spec for heard in self._heard.values() if heard.spec is not None]


@contextlib.asynccontextmanager
async def hear_heartbeats(pool: Pool, host: str, port: int, key: str) -> AsyncIterator[None]:
    """Hear nodes for the length of the block; with port 0 do nothing. Raises RequestError."""
    if not port:
        yield
        return
    address = {"localhost": "127.0.0.1"}.get(host, host), port
    protocol = _Protocol(pool, AnnouncedNodes(key))
    try:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: protocol, local_addr=address
        )
    except OSError as why:
        raise RequestError(
            f"cannot listen for heartbeats on {host}:{port}: {why}; give another port"
        ) from why
    with contextlib.closing(transport):
        async with running_task(protocol.expire_for_ever()):
            yield


class _Protocol(asyncio.DatagramProtocol):
    # Each turn of the event loop reads one datagram (uvloop: 32), a stranger's is refused in 5 us,
    # and the kernel drops the rest: a flood takes CPU time, but no memory.

    def __init__(self, pool: Pool, announced: AnnouncedNodes) -> None:
        self._pool, self._announced = pool, announced
        self._complain_at = 0.0

    def datagram_received(self, data: bytes, addr: object) -> None:
        now = time.monotonic()
        try:
            beat = self._announced.add(data, time.time(), now)
        except KvrelayError as why:
            if now >= self._complain_at:  # a stranger must not fill the log
                self._complain_at = now + _COMPLAIN_S
                _log.warning("a heartbeat is refused: %s", why.message)
            return
        self._tell(now)
        if beat is not None:
            self._pool.note_heartbeat(
                beat.url, beat.load, now, draining=beat.state is NodeState.DRAINING
            )

    async def expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            now = time.monotonic()
            self._announced.expire(now)
            self._tell(now)

    def _tell(self, now: float) -> None:
        if self._announced.changed:
            self._announced.changed = False
            self._pool.set_members(Source.HEARTBEATS, self._announced.specs(), now)
