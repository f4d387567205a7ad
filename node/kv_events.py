"""The sockets on which a node tells its KV events (wire/kv_events.py), in its HTTP process, away from the step loop.

They listen at the node's own host and ask nobody who he is, because a router has no secret: who reaches them can see
whether KV of a text that he knows is here, and no text. Their network must be the cluster's alone.
"""

from __future__ import annotations

import asyncio
import logging
import time

import zmq
import zmq.asyncio

from kv_transfer.zmq_address import listen
from node.event_log import EventLog
from wire.config import NodeConfig
from wire.engine_messages import CacheChanges, EngineReady
from wire.kv_events import END, KvEventsReport, packed_number

__all__ = ["KvEvents"]

log = logging.getLogger("kvrelay.node")

# Batches that wait for a router that does not read; it gets those that were dropped with a replay.
_WAITING_BATCHES = 1024
# Replayed ones; what does not fit is dropped, and asked for again.
_WAITING_REPLAYS = 1 << 16
_MAX_ASK_BYTES = 256


class KvEvents:
    """Listening from the beginning; `close` it."""

    def __init__(self, config: NodeConfig, info: EngineReady, model: str) -> None:
        """Raises ConfigError if the sockets cannot be opened."""
        self._log = EventLog(info.generation, info.block_tokens)
        # What other listeners go by: who it is, and which model's KV this is.
        self._topic = f"kv@{info.engine_id}@{model}".encode()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(_WAITING_BATCHES)
        self._replays = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._replays.set_hwm(_WAITING_REPLAYS)
        self._replays.setsockopt(zmq.MAXMSGSIZE, _MAX_ASK_BYTES)
        for socket in (self._pub, self._replays):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
        called, port = ("host", "kv_events_port"), config.kv_events_port
        try:
            self._port = listen(self._pub, config.host, port, called)
            self._replay_port = listen(self._replays, config.host, port and port + 1, called)
        except BaseException:
            self._close_sockets()
            raise
        self._answering = asyncio.create_task(self._answer())

    def tell(self, changes: CacheChanges) -> None:
        """Tell all who listen now. Waits for none of them."""
        number, payload = self._log.note(changes, time.time())
        self._pub.send_multipart((self._topic, packed_number(number), payload), zmq.NOBLOCK)

    def report(self) -> KvEventsReport:
        """For the health report."""
        return KvEventsReport(self._port, self._replay_port, self._log.next_number)

    async def close(self) -> None:
        """Nothing is told any more."""
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close()
        self._replays.close()

    async def _answer(self) -> None:
        while True:
            asked = await self._replays.recv_multipart()
            if len(asked) != 3 or asked[1] or len(asked[2]) != len(END):
                log.warning("a listener of KV events asks for a replay in %d odd frames", len(asked))
                continue
            who, _, start = asked
            for number, payload in self._log.since(int.from_bytes(start, "big"), time.time()):
                await self._replays.send_multipart((who, b"", packed_number(number), payload))
            await self._replays.send_multipart((who, b"", END, b""))
