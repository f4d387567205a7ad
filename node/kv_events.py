"""KV events of a node (wire/kv_events.py), told over sockets.

Whoever reaches the sockets can see if KV of a known text is here, as routers have no secret.
Replays take a tenth of the event loop's time at most.
"""

from __future__ import annotations

import asyncio
import logging
import time

import zmq
import zmq.asyncio

from kvrelay.kv_transfer.sockets import listen
from kvrelay.wire.engine_messages import CacheChanges
from kvrelay.wire.kv_events import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    KvEventsConfig,
    KvEventsReport,
    address_of,
    pack_batch,
    packed_number,
)
from kvrelay.wire.log_lines import Seldom

__all__ = ["KvEvents"]

log = logging.getLogger("kvrelay.node")

# Batches that wait for one listener; further ones are lost to it until a replay.
_QUEUED_BATCHES = 1_024
# Replay messages for one listener; the rest is dropped, and asked for again.
_QUEUED_REPLAYS = 4
# Replays that one listener may have asked for; it waits with further ones.
_QUEUED_ASKS = 16
_MAX_ASK_BYTES = 256
# A listener that reads nothing for so long is cut off, and its queue freed.
_NOT_READ_MS = 30_000
# After so much time of replays the event loop rests for _REST_TIMES as long.
_TURN_S = 0.002
_REST_TIMES = 9.0


class KvEvents:
    """A publisher of KV events, with replays. Raises ConfigError if a socket cannot be opened."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._held: set[bytes] = set()
        self._next_number = 0
        self._snapshot: bytes | None = None
        """All that is held, until it changes."""
        self._malformed = Seldom()
        self._turn_s = 0.0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(_QUEUED_BATCHES)
        self._replays = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._replays.setsockopt(zmq.SNDHWM, _QUEUED_REPLAYS)
        self._replays.setsockopt(zmq.RCVHWM, _QUEUED_ASKS)
        self._replays.copy_threshold = 0  # all listeners' queues share the same bytes
        for socket in (self._pub, self._replays):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ASK_BYTES)  # for subscriptions, too
            socket.setsockopt(zmq.TCP_MAXRT, _NOT_READ_MS)
        try:
            self._port, self._replay_port = (
                listen(socket, *address_of(getattr(config, name)), (name, "port"))
                for socket, name in (
                    (self._pub, "endpoint"),
                    (self._replays, "replay_endpoint"),
                )
            )
        except BaseException:
            self._close_sockets()
            raise
        self._replaying = asyncio.create_task(self._replay())

    def publish(self, changes: CacheChanges) -> None:
        events: list[Event] = []
        if changes.cleared:
            self._held.clear()
            events.append(AllBlocksCleared())
        if changes.removed:
            self._held.difference_update(changes.removed)
            events.append(BlockRemoved(changes.removed))
        if changes.stored:
            self._held.update(changes.stored)
            events.append(BlockStored(changes.stored))
        number, self._next_number, self._snapshot = self._next_number, self._next_number + 1, None
        payload = pack_batch(EventBatch(time.time(), events))
        self._pub.send_multipart((b"", packed_number(number), payload), zmq.NOBLOCK)

    def report(self) -> KvEventsReport:
        return KvEventsReport(self._port, self._replay_port, self._next_number)

    async def close(self) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close()
        self._replays.close()

    async def _replay(self) -> None:
        while True:
            began = time.monotonic()
            asking = asyncio.ensure_future(self._replays.recv_multipart())
            # zmq returns what is there already without a turn of the event loop.
            if not asking.done():
                await asking
                began = time.monotonic()
            listener, *frames = asking.result()
            if len(frames) != 2 or frames[0] or len(frames[1]) != len(END):
                if times := self._malformed.times(time.monotonic()):
                    log.warning(
                        "malformed asks for replays of KV events, times=%d since the last line",
                        times,
                    )
                await self._rest(began)
                continue
            if int.from_bytes(frames[1], "big") < self._next_number:
                if self._snapshot is None:
                    events: list[Event] = [AllBlocksCleared(), BlockStored(list(self._held))]
                    self._snapshot = pack_batch(EventBatch(time.time(), events))
                number = packed_number(self._next_number - 1)
                whole = (listener, b"", number, self._snapshot)
                await self._replays.send_multipart(whole, copy=False)
            await self._replays.send_multipart((listener, b"", END, b""))
            await self._rest(began)

    async def _rest(self, began: float) -> None:
        self._turn_s += time.monotonic() - began
        if self._turn_s >= _TURN_S:
            turn_s, self._turn_s = self._turn_s, 0.0
            await asyncio.sleep(_REST_TIMES * turn_s)
