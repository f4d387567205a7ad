"""The sockets on which a node tells its KV events (wire/kv_events.py), in its HTTP process, away
from the step loop.

There are none unless kv_events_config asks for them. They ask nobody who he is, because a router
has no secret: who reaches them can see whether KV of a text that he knows is here, and no text
unless token_ids are told. What he can make the node do is bounded: replays take a tenth of the
event loop's time at most, and who does not read what he has asked for is cut off. A message whose
frames never end is not: libzmq collects them before we see any, until memory runs out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from kvrelay.kv_transfer.sockets import listen
from kvrelay.node.event_log import EventLog
from kvrelay.wire.engine_messages import CacheChanges
from kvrelay.wire.kv_events import END, KvEventsReport, packed_number
from kvrelay.wire.kv_events_config import KvEventsConfig, address_of
from kvrelay.wire.log_lines import Seldom

__all__ = ["KvEvents"]

log = logging.getLogger("kvrelay.node")

# Whole replays that wait for one listener. What does not fit is dropped, and asked for again.
_WAITING_REPLAYS = 2
# Questions that one listener may have open; it waits with further ones.
_WAITING_ASKS = 16
_MAX_ASK_BYTES = 256
_NOT_READ_MS = 30_000
"""Who takes nothing for so long while something waits for him is cut off, and what waits is freed."""
_TURN_S = 0.002
_REST = 9.0
"""Each turn of replays is followed by so many times its length for everything else."""


class KvEvents:
    """Listening from the beginning; `close` it."""

    def __init__(self, config: KvEventsConfig, block_size: int) -> None:
        """Raises ConfigError if the sockets cannot be opened."""
        self.counted: Callable[[str], None] = lambda outcome: None
        """Told of each replay that was asked for: ok or malformed."""
        self._log = EventLog(block_size, config.buffer_steps, maps=config.event_format == "map")
        self._malformed = Seldom()
        self._turn_s = 0.0
        """What replays have taken of the event loop since it last had a rest of them."""
        self._topic = config.topic.encode()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replays = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._replays.setsockopt(zmq.SNDHWM, _WAITING_REPLAYS * (config.buffer_steps + 2))
        self._replays.setsockopt(zmq.RCVHWM, _WAITING_ASKS)
        self._replays.copy_threshold = 0  # all listeners' queues have the same bytes
        for socket in (self._pub, self._replays):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ASK_BYTES)  # for subscriptions, too
            socket.setsockopt(zmq.TCP_MAXRT, _NOT_READ_MS)
        self._replay_port = 0
        try:
            self._port = listen(self._pub, *address_of(config.endpoint), ("endpoint", "port"))
            if config.replay_endpoint:
                called = "replay_endpoint", "port"
                self._replay_port = listen(
                    self._replays, *address_of(config.replay_endpoint), called
                )
        except BaseException:
            self._close_sockets()
            raise
        self._answering = asyncio.create_task(self._answer())

    def tell(self, changes: CacheChanges) -> None:
        """Tell all who listen now. Waits for none of them."""
        number, payload = self._log.note(changes, time.time())
        self._pub.send_multipart((self._topic, packed_number(number), payload), zmq.NOBLOCK)

    def report(self) -> KvEventsReport | None:
        """Say in the health report where a router can listen. Without replays it cannot know what
        is held.
        """
        return (
            KvEventsReport(self._port, self._replay_port, self._log.next_number)
            if self._replay_port
            else None
        )

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
            began = time.monotonic()
            asking = asyncio.ensure_future(self._replays.recv_multipart())
            if (
                not asking.done()
            ):  # zmq gives what is there already without a turn of the event loop
                await asking
                began = time.monotonic()
            who, *frames = asking.result()
            if len(frames) != 2 or frames[0] or len(frames[1]) != len(END):
                self._note_malformed()
                await self._rest(began)
                continue
            self.counted("ok")
            for number, payload in self._log.since(int.from_bytes(frames[1], "big"), time.time()):
                await self._replays.send_multipart(
                    (who, b"", packed_number(number), payload), copy=False
                )
                began = await self._rest(began)
            await self._replays.send_multipart((who, b"", END, b""))
            await self._rest(began)

    def _note_malformed(self) -> None:
        self.counted("malformed")
        if times := self._malformed.times(time.monotonic()):
            log.warning(
                "replays of KV events were asked for in odd frames, times=%d since this was last "
                "said",
                times,
            )

    async def _rest(self, began: float) -> float:
        """Count the time since `began`, and leave the loop to others when it was a turn's. What
        time it is then.
        """
        now = time.monotonic()
        self._turn_s += now - began
        if self._turn_s < _TURN_S:
            return now
        turn_s, self._turn_s = self._turn_s, 0.0
        await asyncio.sleep(_REST * turn_s)
        return time.monotonic()
