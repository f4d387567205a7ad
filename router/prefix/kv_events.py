"""Listens to the nodes' KV events for the prefix index: a ZMQ socket per node, on the event loop.

PUB/SUB may lose anything. A missing number is asked for again; the health report says which number
comes next, and so whether any is missing at the end. Nothing here delays a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from kvrelay.router.prefix.index import PrefixIndex
from kvrelay.router.prefix.metrics import PrefixMetrics
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.kv_events import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEventsReport,
    is_snapshot,
    keys_of,
    number_of,
    packed_number,
    read_batch,
)

__all__ = ["MAX_AHEAD", "EventStream", "KvEvents"]

REPLAY_DEADLINE_S = 10.0
RETRY_S = 2.0
"""The time after a replay that failed."""
MAX_AHEAD = 4_096
"""Batches that wait for a missing one; more are dropped, and come again with the next replay."""
_MAX_MESSAGE_BYTES = 64 << 20
# Of each kind; ZeroMQ's own limit is 1,023, and there is one per node.
_MAX_SOCKETS = 16_384
# Batches that are taken before requests have their turn again.
_AT_ONCE = 32
_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.IPV6, 1),
    (zmq.RCVHWM, MAX_AHEAD),
    (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
)

_log = logging.getLogger("kvrelay.router")


class EventStream:
    """A node's batches in order, whatever is lost, doubled or late. Pure.

    It begins with a replay. One that does not reach back far enough brings a snapshot instead.
    """

    def __init__(self) -> None:
        self.next_number = 0  # of the batch that is taken next
        self.complete = False  # what was taken is all that the node held
        self._ahead: dict[int, EventBatch] = {}

    @property
    def gap(self) -> bool:
        return not self.complete or bool(self._ahead)

    def add(self, number: int, batch: EventBatch) -> list[EventBatch]:
        """Add a batch, live or of a replay; return those that can be taken now, in order."""
        if number < self.next_number:
            return []
        if is_snapshot(batch):
            self.next_number = number + 1
            self._ahead = {at: later for at, later in self._ahead.items() if at > number}
            return [batch, *self._following()]
        if len(self._ahead) < MAX_AHEAD or number == self.next_number:
            self._ahead[number] = batch
        return self._following() if self.complete else []

    def end_replay(self) -> list[EventBatch]:
        """Return the batches that can be taken now; there may still be a gap."""
        self.complete = True
        return self._following()

    def _following(self) -> list[EventBatch]:
        ready: list[EventBatch] = []
        while (batch := self._ahead.pop(self.next_number, None)) is not None:
            ready.append(batch)
            self.next_number += 1
        return ready


class KvEvents:
    """A listener to all nodes, by URL. Call it on the event loop; `close` it."""

    def __init__(self, index: PrefixIndex, metrics: PrefixMetrics) -> None:
        self._index = index
        self._metrics = metrics
        self._listeners: dict[str, _Listener] = {}
        for kind in (zmq.Context, zmq.asyncio.Context):
            kind.instance().set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        metrics.doubted.set_function(lambda: sum(not index.trusts(url) for url in self._listeners))

    def note_report(self, url: str, generation: str, report: KvEventsReport | None) -> None:
        if report is None:
            self.leave(url)
            return
        told_at = generation, report.port, report.replay_port
        listener = self._listeners.get(url)
        if listener is None or listener.told_at != told_at:
            self.leave(url)
            listener = _Listener(url, told_at, self._index, self._metrics)
            self._listeners[url] = listener
        listener.should_have(report.next_number)

    def leave(self, url: str) -> None:
        listener = self._listeners.pop(url, None)
        if listener is not None:
            listener.close()
            self._index.forget(url)

    async def close(self) -> None:
        ended = [listener.close() for listener in self._listeners.values()]
        self._listeners.clear()
        await asyncio.gather(*filter(None, ended), return_exceptions=True)


class _Listener:
    def __init__(
        self, url: str, told_at: tuple[str, int, int], index: PrefixIndex, metrics: PrefixMetrics
    ) -> None:
        self.told_at = told_at
        self._url = url
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        self._events, self._replays = (f"tcp://{host}:{port}" for port in told_at[1:])
        self._stream = EventStream()
        self._index = index
        self._metrics = metrics
        self._expected = 0  # the number of the next batch, as of the last health report
        self._retry_at = 0.0
        self._failure = ""
        self._replay: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        self._catch_up()

    def close(self) -> asyncio.Task[None] | None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._replay is not None:
            self._replay.cancel()
        return self._replay

    def should_have(self, next_number: int) -> None:
        """Note that the node has sent all batches before this one.

        Those of the report before must have come by now.
        """
        self._read()
        missing = self._stream.next_number < self._expected
        if missing or not self._index.trusts(self._url):
            self._catch_up(missing=missing)
        self._expected = next_number

    def _listen(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        try:
            for option, value in _OPTIONS:
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._events)
        except zmq.ZMQError:
            socket.close()
            raise
        self._loop.add_reader(socket.fileno(), self._read)
        return socket

    def _read(self) -> None:
        # zmq's descriptor signals once, however much has come: all of it must be read.
        for _ in range(_AT_ONCE):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(frames[1:])
        else:
            self._loop.call_soon(self._read)
        if self._stream.gap:
            self._catch_up()

    def _take(self, frames: Sequence[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise NodeFailed(f"KV events come in 3 frames, got {len(frames) + 1}")
            number, batch = number_of(frames[0]), read_batch(frames[1])
        except NodeFailed as why:
            _log.warning("node %s: %s", self._url, why.message)
            return
        self._apply(self._stream.add(number, batch))

    def _apply(self, batches: Sequence[EventBatch]) -> None:
        index, url = self._index, self._url
        for batch in batches:
            if is_snapshot(batch):
                self._metrics.snapshots.inc()
            for event in batch.events:
                match event:
                    case AllBlocksCleared():
                        trusted = index.trusts(url)
                        index.forget(url)
                        if trusted:
                            index.trust(url)
                    case BlockStored():
                        index.stored(url, keys_of(event.block_hashes))
                        self._metrics.event_blocks.inc(len(event.block_hashes))
                    case BlockRemoved():
                        index.removed(url, keys_of(event.block_hashes))
                        self._metrics.event_blocks.inc(len(event.block_hashes))
            self._metrics.batches.inc()

    def _catch_up(self, *, missing: bool = True) -> None:
        if self._replay is None and time.monotonic() >= self._retry_at:
            if missing and self._stream.complete:
                self._metrics.gaps.inc()
            self._replay = asyncio.create_task(self._replayed())

    async def _replayed(self) -> None:
        why = ""
        try:
            self._socket = self._socket or self._listen()
            async with asyncio.timeout(REPLAY_DEADLINE_S):
                await self._ask()
            self._apply(self._stream.end_replay())
            if self._stream.gap:
                why = "batches are missing after the replay"
        except TimeoutError:
            why = f"no replay from {self._replays} within {REPLAY_DEADLINE_S:g} s"
        except zmq.ZMQError as error:
            why = f"cannot listen at {self._events} and {self._replays}: {error}"
        self._replay = None
        self._metrics.replays.labels("failed" if why else "ok").inc()
        again, self._failure = why == self._failure, why
        if why:
            level = logging.DEBUG if again else logging.WARNING
            _log.log(
                level, "node %s: KV events: %s; choosing by what was sent there", self._url, why
            )
            self._retry_at = time.monotonic() + RETRY_S
            self._index.doubt(self._url)
        else:
            self._index.trust(self._url)

    async def _ask(self) -> None:
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            for option, value in _OPTIONS:
                socket.setsockopt(option, value)
            socket.connect(self._replays)
            await socket.send_multipart((b"", packed_number(self._stream.next_number)))
            while True:
                _, *frames = await socket.recv_multipart()
                if frames and frames[0] == END:
                    return
                self._take(frames)
