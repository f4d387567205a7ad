"""KV events of a node (wire/kv_events.py): a numbered log, and the sockets that publish it.

Whoever reaches the sockets can see if KV of a known text is here, as routers have no secret.
Replays take a tenth of the event loop's time at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator

import zmq
import zmq.asyncio

from kvrelay.kv_transfer.sockets import listen
from kvrelay.wire.engine_messages import BlockText, CacheChanges
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

__all__ = ["EventLog", "KvEvents"]

log = logging.getLogger("kvrelay.node")

# A listener that has lost more gets all that is held instead, which is no more for a pool of
# 200,000 blocks without their tokens.
BUFFER_BYTES = 4 << 20
_MEDIUM = "GPU"
# Whole replays that wait for one listener. What does not fit is dropped, and asked for again.
_QUEUED_REPLAYS = 2
# Replays that one listener may have asked for; it waits with further ones.
_QUEUED_ASKS = 16
_MAX_ASK_BYTES = 256
# A listener that reads nothing for so long is cut off, and its queue freed.
_NOT_READ_MS = 30_000
# After so much time of replays the event loop rests for _REST_TIMES as long.
_TURN_S = 0.002
_REST_TIMES = 9.0


class EventLog:
    """A log of numbered batches of KV events, of which the newest `buffer_steps` are kept. Pure."""

    def __init__(self, block_size: int, buffer_steps: int, *, maps: bool = False) -> None:
        self.next_number = 0
        self._block_size, self._buffer_steps, self._maps = block_size, buffer_steps, maps
        self._held: dict[bytes, bytes | None] = {}
        """Parent by block, parents first."""
        self._texts: dict[bytes, BlockText] = {}
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._snapshot: tuple[int, bytes] | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    def append(self, changes: CacheChanges, now: float) -> tuple[int, bytes]:
        """Return the next number and batch. `now` is in Unix seconds."""
        if changes.cleared:
            self._held.clear()
            self._texts.clear()
        for block_hash in changes.removed:
            self._held.pop(block_hash, None)
            self._texts.pop(block_hash, None)
        for block_hash, parent in changes.stored.items():
            self._held.pop(block_hash, None)  # behind its parent again
            self._held[block_hash] = parent
        self._texts |= changes.texts
        events: list[Event] = [AllBlocksCleared()] if changes.cleared else []
        if changes.removed:
            events.append(BlockRemoved(list(changes.removed), _MEDIUM))
        events += self._chains(changes.stored)
        number, payload = self.next_number, self._packed(events, now)
        self.next_number += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > BUFFER_BYTES or len(self._kept) > self._buffer_steps:
            self._kept_bytes -= len(self._kept.popleft()[1])
        return number, payload

    def since(self, number: int, now: float) -> list[tuple[int, bytes]]:
        """Return the batches from `number` on, or a snapshot and what follows it.

        A snapshot is made anew only when its successor is not kept any more.
        """
        if number >= self.next_number:
            return []
        first = self.next_number - len(self._kept)
        if number >= first:
            return [kept for kept in self._kept if kept[0] >= number]
        snapshot = self._snapshot
        if snapshot is None or snapshot[0] + 1 < first:
            payload = self._packed([AllBlocksCleared(), *self._chains(self._held)], now)
            snapshot = self._snapshot = (self.next_number - 1, payload)
        return [snapshot, *(kept for kept in self._kept if kept[0] > snapshot[0])]

    def _packed(self, events: list[Event], now: float) -> bytes:
        return pack_batch(EventBatch(now, events), maps=self._maps)

    def _chains(self, stored: dict[bytes, bytes | None]) -> Iterator[BlockStored]:
        run: list[bytes] = []
        first_parent: bytes | None = None
        for block_hash, parent in stored.items():
            if run and parent != run[-1]:
                yield self._chain(run, first_parent)
                run = []
            if not run:
                first_parent = parent
            run.append(block_hash)
        if run:
            yield self._chain(run, first_parent)

    def _chain(self, run: list[bytes], parent: bytes | None) -> BlockStored:
        texts = [self._texts[block_hash] for block_hash in run if block_hash in self._texts]
        keys = [[key for key in (text.adapter, text.salt) if key] or None for text in texts]
        return BlockStored(
            block_hashes=[*run],
            parent_block_hash=parent,
            token_ids=[token for text in texts for token in text.token_ids],
            block_size=self._block_size,
            medium=_MEDIUM,
            lora_name=(texts[0].adapter or None) if texts else None,
            extra_keys=keys if any(keys) else None,
        )


class KvEvents:
    """A publisher of KV events, with replays. Raises ConfigError if a socket cannot be opened."""

    def __init__(self, config: KvEventsConfig, block_size: int) -> None:
        self._log = EventLog(block_size, config.buffer_steps, maps=config.event_format == "map")
        self._malformed = Seldom()
        self._turn_s = 0.0
        self._topic = config.topic.encode()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replays = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._replays.setsockopt(zmq.SNDHWM, _QUEUED_REPLAYS * (config.buffer_steps + 2))
        self._replays.setsockopt(zmq.RCVHWM, _QUEUED_ASKS)
        self._replays.copy_threshold = 0  # all listeners' queues share the same bytes
        for socket in (self._pub, self._replays):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ASK_BYTES)  # for subscriptions, too
            socket.setsockopt(zmq.TCP_MAXRT, _NOT_READ_MS)
        self._replay_port = 0
        try:
            self._port = listen(self._pub, *address_of(config.endpoint), ("endpoint", "port"))
            if config.replay_endpoint:
                names = "replay_endpoint", "port"
                address = address_of(config.replay_endpoint)
                self._replay_port = listen(self._replays, *address, names)
        except BaseException:
            self._close_sockets()
            raise
        self._replaying = asyncio.create_task(self._replay())

    def publish(self, changes: CacheChanges) -> None:
        number, payload = self._log.append(changes, time.time())
        self._pub.send_multipart((self._topic, packed_number(number), payload), zmq.NOBLOCK)

    def report(self) -> KvEventsReport | None:
        """Return where routers can listen; None without replays."""
        if not self._replay_port:
            return None
        return KvEventsReport(self._port, self._replay_port, self._log.next_number)

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
                self._note_malformed()
                await self._rest(began)
                continue
            for number, payload in self._log.since(int.from_bytes(frames[1], "big"), time.time()):
                await self._replays.send_multipart(
                    (listener, b"", packed_number(number), payload), copy=False
                )
                began = await self._rest(began)
            await self._replays.send_multipart((listener, b"", END, b""))
            await self._rest(began)

    def _note_malformed(self) -> None:
        if times := self._malformed.times(time.monotonic()):
            log.warning(
                "malformed asks for replays of KV events, times=%d since the last line", times
            )

    async def _rest(self, began: float) -> float:
        now = time.monotonic()
        self._turn_s += now - began
        if self._turn_s < _TURN_S:
            return now
        turn_s, self._turn_s = self._turn_s, 0.0
        await asyncio.sleep(_REST_TIMES * turn_s)
        return time.monotonic()
