"""vLLM nodes with a P2pNcclConnector name themselves: a ZMQ message every 3 s, from which this
router knows them.

A ping is a msgpack map of `type` ("P" or "D"), `http_address` and `zmq_address`, both host:port. A
node that is silent for EXPIRY_S is no member any more. Pings have no authentication: who reaches
the port can name a node, which gets prompts then; so the port is off unless it is asked for, and
its network must be the nodes' alone. Where nodes want a key, only hosts of --node-allow and of
listed nodes can be named, because a node that is named gets that key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from kvrelay.router.nodes.members import NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = ["EXPIRY_S", "PingBook", "hearing_pings"]

EXPIRY_S = 10.0
"""Three pings missed."""

_MAX_NODES = 4096
_MAX_PING_BYTES = 4096
_TELL_S = 1.0
_COMPLAIN_S = 10.0
_ROLES = {"P": Role.PREFILL, "D": Role.DECODE}

_log = logging.getLogger("kvrelay.router")


class _Ping(msgspec.Struct):
    type: Literal["P", "D"]
    http_address: str
    zmq_address: str


_decoder = msgspec.msgpack.Decoder(_Ping)


class PingBook:
    """A record of who has pinged, and when. Pure; times are any one monotonic clock."""

    def __init__(self, may_be_node: Callable[[str], bool]) -> None:
        """`may_be_node` is RouterConfig's."""
        self._may_be_node = may_be_node
        self._heard: dict[str, tuple[NodeSpec, str, float]] = {}

    def take(self, message: bytes, now: float) -> None:
        """Note a ping. Raises RequestError for what is none."""
        try:
            ping = _decoder.decode(message)
            # A colon apart from the port's would be read as an address in a request's id.
            if (
                ping.zmq_address.count(":") != 1
                or not ping.zmq_address.rpartition(":")[2].isdecimal()
            ):
                raise RequestError(f"zmq_address must be host:port, got {ping.zmq_address[:80]!r}")
            NodeSpec(f"http://{ping.zmq_address}", Role.PREFILL)
            spec = NodeSpec(f"http://{ping.http_address}", _ROLES[ping.type])
        except MALFORMED as why:
            raise RequestError(f"it is no ping: {why}") from why
        if not self._may_be_node(spec.url):
            raise RequestError(
                f"{spec.url} would get the nodes' key; give --node-allow if its host is to be a "
                f"node"
            )
        if spec.url not in self._heard and len(self._heard) >= _MAX_NODES:
            raise RequestError(f"{_MAX_NODES} nodes have named themselves already")
        self._heard[spec.url] = (spec, ping.zmq_address, now)

    def members(self, now: float) -> list[tuple[NodeSpec, str]]:
        """Return the nodes, each with the address of its ZMQ socket; forget who has been silent for
        too long.
        """
        self._heard = {
            url: heard for url, heard in self._heard.items() if now - heard[2] <= EXPIRY_S
        }
        return [(spec, address) for spec, address, _ in self._heard.values()]


@asynccontextmanager
async def hearing_pings(
    pool: Pool, host: str, port: int, may_be_node: Callable[[str], bool]
) -> AsyncIterator[None]:
    """Keep the pool to who pings, for the length of the block; with port 0 do nothing. Raises
    RequestError.
    """
    if not port:
        yield
        return
    address = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_PING_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, ":" in host)
        try:
            socket.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError as why:
            raise RequestError(
                f"cannot listen for pings on {host}:{port}: {why}; give another p2p_nccl_port"
            ) from why
        task = asyncio.create_task(_hear(pool, socket, PingBook(may_be_node)))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _hear(pool: Pool, socket: zmq.asyncio.Socket, book: PingBook) -> None:
    tell_at = complain_at = 0.0
    told: list[tuple[NodeSpec, str]] = []
    while True:
        came = await socket.poll(_TELL_S * 1e3)
        now = time.monotonic()
        if came:
            try:
                book.take((await socket.recv_multipart())[-1], now)
            except RequestError as why:
                if now >= complain_at:  # a stranger must not fill the log
                    complain_at = now + _COMPLAIN_S
                    _log.warning("a ping is refused: %s", why.message)
        if now >= tell_at:
            tell_at = now + _TELL_S
            if (members := book.members(now)) != told:
                told = members
                pool.set_members(Source.P2P_NCCL, [spec for spec, _ in members], now)
                for spec, address in members:
                    pool.note_p2p_address(spec.url, address)
