"""Listens to the nodes' KV events for the prefix index: a ZMQ socket per node, on the event loop.

PUB/SUB may lose anything at any time. A missing number is asked for again; the health report says
which number comes next, and so whether any is missing at the end. While a node's events are not to
be had, the index goes by what was sent there. Nothing here delays a request.

A vLLM node says neither where its events are nor which number comes next: the ports are configured,
a loss at the end is looked for once the node is quiet, and where its replays reach back too little,
it holds more than it tells. Batches name no process: a newer one with a lower number is another
process's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from kvrelay.router.prefix.block_contents import BlockContents
from kvrelay.router.prefix.event_stream import EventStream
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

__all__ = ["KvEvents"]

REPLAY_DEADLINE_S = 10.0
RETRY_S = 2.0
"""The time after a replay that failed."""
LOOK_AGAIN_S = 5.0
"""The time between two replays of a quiet vLLM node, whose last batches may be lost."""
_MAX_MESSAGE_BYTES = 64 << 20
# Of each kind; ZeroMQ's own limit is 1,023, and there is one per node.
_MAX_SOCKETS = 16_384
# Batches that are taken before requests have their turn again.
_AT_ONCE = 32
_WAITING_BATCHES = 4_096

_log = logging.getLogger("kvrelay.router")


class KvEvents:
    """A listener to all nodes, by URL. Call it on the event loop; `close` it."""

    def __init__(
        self,
        index: PrefixIndex,
        metrics: PrefixMetrics,
        vllm_ports: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """`vllm_ports`: the ports of events and replays (0: none) of vLLM nodes by URL, or by ""."""
        self._index = index
        self._metrics = metrics
        self._vllm_ports = vllm_ports
        self._sources: dict[str, _Listener] = {}
        for kind in (zmq.Context, zmq.asyncio.Context):
            kind.instance().set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        metrics.doubted.set_function(lambda: sum(not index.trusts(url) for url in self._sources))

    def note_report(self, url: str, generation: str, report: KvEventsReport | None) -> None:
        """Listen to a node whose health report tells of events."""
        if report is None:
            self.leave(url)
        else:
            self._source(url, generation, report.port, report.replay_port).should_have(
                report.next_number
            )

    def note_vllm_report(
        self, url: str, generation: str, engines: int, aliases: Collection[str]
    ) -> None:
        """Listen to a vLLM node, unless several engines are behind its address."""
        ports = self._vllm_ports.get(url, self._vllm_ports.get(""))
        # Each engine has a cache of its own, and nobody knows which one gets a request.
        if ports is None or engines > 1:
            self.leave(url)
        else:
            source = self._source(url, generation, *ports, vllm=True)
            self._index.contents[url].aliases = aliases
            source.look_again()

    def _source(
        self, url: str, generation: str, port: int, replay_port: int, *, vllm: bool = False
    ) -> _Listener:
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        told_at = (
            generation,
            f"tcp://{host}:{port}",
            f"tcp://{host}:{replay_port}" if replay_port else "",
        )
        source = self._sources.get(url)
        if source is None or source.told_at != told_at:
            self.leave(url)
            # Without replays, what it held before is never told.
            contents = BlockContents(whole=bool(replay_port)) if vllm else None
            source = self._sources[url] = _Listener(
                url, told_at, contents, self._index, self._metrics
            )
        return source

    def leave(self, url: str) -> None:
        """Forget a node that is gone, or another process now."""
        source = self._sources.pop(url, None)
        if source is not None:
            source.close()
            self._index.forget(url)

    async def close(self) -> None:
        """Stop listening."""
        ended = [source.close() for source in self._sources.values()]
        self._sources.clear()
        await asyncio.gather(*[task for task in ended if task is not None], return_exceptions=True)


class _Listener:
    def __init__(
        self,
        url: str,
        told_at: tuple[str, str, str],
        contents: BlockContents | None,
        index: PrefixIndex,
        metrics: PrefixMetrics,
    ) -> None:
        # The generation, and the ZMQ endpoints of events and replays.
        self.told_at = told_at
        self._url = url
        _, self._events, self._replays = told_at
        self._stream = EventStream(rebuilds=contents is None)
        self._contents = contents
        self._newest = 0.0  # when the newest batch was made, by the node's clock
        self._index = index
        self._metrics = metrics
        self._expected = 0  # the number of the next batch, as of the last health report
        self._look_at = 0.0
        self._retry_at = 0.0
        self._failure = ""
        self._replay: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        if contents is not None:
            index.contents[url] = contents
        self._catch_up()

    def close(self) -> asyncio.Task[None] | None:
        """Stop listening; return the replay that has yet to end, if there is one."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._replay is not None:
            self._replay.cancel()
        self._index.contents.pop(self._url, None)
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

    def look_again(self) -> None:
        """Ask for batches that are missing at the end, if none come."""
        self._read()
        quiet, self._expected = self._stream.next_number == self._expected, self._stream.next_number
        asks = self._replays or not self._index.trusts(self._url)
        if asks and quiet and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            self._catch_up(missing=False)

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
        if number < self._stream.next_number and batch.ts > self._newest and not is_snapshot(batch):
            # Another process: its health may not say so yet, or ever.
            self._stream = EventStream(rebuilds=self._contents is None)
            self._index.doubt(self._url)
            self._forget(whole=bool(self._replays))
        self._apply(self._stream.add(number, batch))

    def _apply(self, batches: Sequence[EventBatch]) -> None:
        contents = self._contents
        for batch in batches:
            blocks = 0
            if is_snapshot(batch):
                self._metrics.snapshots.inc()
            for event in batch.events:
                match event:
                    case AllBlocksCleared():
                        self._forget(whole=True)
                    case BlockStored() if _counts(event):
                        keys = (
                            keys_of(event.block_hashes)
                            if contents is None
                            else contents.stored(event)
                        )
                        self._index.stored(self._url, keys)
                        blocks += len(event.block_hashes)
                    case BlockRemoved() if _counts(event):
                        keys = (
                            keys_of(event.block_hashes)
                            if contents is None
                            else contents.removed(event)
                        )
                        self._index.removed(self._url, keys)
                        blocks += len(event.block_hashes)
            self._newest = max(self._newest, batch.ts)
            self._metrics.batches.inc()
            self._metrics.event_blocks.inc(blocks)
        if self._index.trusts(self._url):
            self._trust()

    def _forget(self, *, whole: bool) -> None:
        trusted = self._index.trusts(self._url)
        self._index.forget(self._url)
        if self._contents is not None:
            self._contents.clear(whole=whole)
        if trusted:
            self._trust()

    def _trust(self) -> None:
        self._index.trust(self._url, whole=self._contents is None or self._contents.whole)

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
                if self._replays:
                    await self._ask()
            batches, lost = self._stream.end_replay()
            if lost:
                self._forget(whole=False)
            self._apply(batches)
            if self._stream.gap:
                why = "batches are missing after the replay"
        except TimeoutError:
            why = (
                f"no replay from {self._replays} within {REPLAY_DEADLINE_S:g} s; its "
                f"replay_endpoint must be there"
            )
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
            self._trust()

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


_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.IPV6, 1),
    (zmq.RCVHWM, _WAITING_BATCHES),
    (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
)


def _counts(event: BlockStored | BlockRemoved) -> bool:
    # Only KV on the device that all layers can read says how much of a prompt is cached.
    return event.group_idx in (None, 0) and event.medium in (None, "GPU")
