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
from kvrelay.wire.heartbeat import LOST_AFTER_S, MAX_SKEW_S, NodeState, opened
from kvrelay.wire.log_lines import Seldom

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


class AnnouncedNodes(asyncio.DatagramProtocol):
    # Each turn of the event loop reads one datagram (uvloop: 32), a stranger's is refused in 5 us,
    # and the kernel drops the rest: a flood takes CPU time, but no memory.

    def __init__(self, pool: Pool, key: str) -> None:
        self._pool, self._key = pool, key
        self._heard: dict[str, _Heard] = {}
        self._refused = Seldom(_COMPLAIN_S)

    def datagram_received(self, data: bytes, addr: object) -> None:
        now = time.monotonic()
        try:
            self.add(data, time.time(), now)
        except KvrelayError as why:
            if self._refused.times(now):  # a stranger must not fill the log
                _log.warning("a heartbeat is refused: %s", why.message)

    def add(self, message: bytes, unix_now: float, now: float) -> None:
        """Take over a message, unless it is out of date. Raises KvrelayError."""
        beat = opened(message, self._key, unix_now)
        spec = NodeSpec(beat.url, beat.role)
        known = self._heard.get(spec.url)
        if known is None:
            if len(self._heard) >= MAX_NODES:
                raise RequestError(
                    f"{MAX_NODES} nodes have announced themselves; {spec.url} is one too many"
                )
        elif beat.sent_at <= known.sent_at:
            return
        there = None if beat.state is NodeState.LEAVING else spec
        self._heard[spec.url] = _Heard(beat.sent_at, now, there)
        if there != (known and known.spec):
            self._tell(now)

    async def expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self.expire(time.monotonic())

    def expire(self, now: float) -> None:
        heard = self._heard.items()
        lost = [url for url, each in heard if each.spec and now - each.at > LOST_AFTER_S]
        for url in lost:
            _log.warning("node %s is heard no more", url)
            self._heard[url].spec = None
        if lost:
            self._tell(now)
        # Kept for as long as an old message could be played again.
        for url in [url for url, each in self._heard.items() if now - each.at > 2 * MAX_SKEW_S]:
            del self._heard[url]

    def _tell(self, now: float) -> None:
        there = [each.spec for each in self._heard.values() if each.spec is not None]
        self._pool.set_members(Source.HEARTBEATS, there, now)


@contextlib.asynccontextmanager
async def hear_heartbeats(pool: Pool, host: str, port: int, key: str) -> AsyncIterator[None]:
    """Hear nodes for the length of the block; with port 0 do nothing. Raises RequestError."""
    if not port:
        yield
        return
    address = {"localhost": "127.0.0.1"}.get(host, host), port
    announced = AnnouncedNodes(pool, key)
    try:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: announced, local_addr=address
        )
    except OSError as why:
        raise RequestError(
            f"cannot listen for heartbeats on {host}:{port}: {why}; give another port"
        ) from why
    with contextlib.closing(transport):
        async with running_task(announced.expire_for_ever()):
            yield
