"""Listens to the nodes' KV events for the prefix index: a task per node.

PUB/SUB may lose anything. A missing number is asked for again; a replay that does not reach back
far enough brings a snapshot instead. The health report says which number comes next, and so whether
any is missing at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from math import inf
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from prometheus_client import Counter

from kvrelay.router.prefix.index import PrefixIndex
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.kv_events import (
    END,
    BlockRemoved,
    BlockStored,
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
"""The time after a failure."""
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_AHEAD = 4_096  # batches in a socket; more are dropped, and replayed
_MAX_SOCKETS = 16_384  # two per node; ZeroMQ's own limit is 1,023

_log = logging.getLogger("kvrelay.router")


class KvEvents:
    """A listener to all nodes, by URL. Call it on the event loop; `close` it."""

    def __init__(self, index: PrefixIndex, blocks: Counter) -> None:
        self._index, self._blocks = index, blocks
        self._listeners: dict[str, _Listener] = {}
        zmq.asyncio.Context.instance().set(zmq.MAX_SOCKETS, _MAX_SOCKETS)

    def doubted(self) -> int:
        return sum(not self._index.trusts(url) for url in self._listeners)

    def note_report(self, url: str, generation: str, report: KvEventsReport | None) -> None:
        if report is None:
            self.leave(url)
            return
        told_at = generation, report.port, report.replay_port
        listener = self._listeners.get(url)
        if listener is None or listener.told_at != told_at:
            self.leave(url)
            listener = _Listener(url, told_at, self._index, self._blocks)
            self._listeners[url] = listener
        listener.should_have(report.next_number)

    def leave(self, url: str) -> None:
        listener = self._listeners.pop(url, None)
        if listener is not None:
            listener.task.cancel()
            self._index.forget(url)

    async def close(self) -> None:
        tasks = [listener.task for listener in self._listeners.values()]
        self._listeners.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Listener:
    def __init__(
        self, url: str, told_at: tuple[str, int, int], index: PrefixIndex, blocks: Counter
    ) -> None:
        self.told_at = told_at
        self._url, self._index, self._blocks = url, index, blocks
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        self._events, self._replays = (f"tcp://{host}:{port}" for port in told_at[1:])
        self._next = 0  # number of the next batch
        self._expected = self._reached = 0  # as of the last health report
        self._restarted_at = -inf
        self._caught_up = False
        self._failure = ""
        self.task = asyncio.create_task(self._listen())

    def should_have(self, next_number: int) -> None:
        """Note that the node has sent all batches before this one.

        Those of the report before must have come by now, unless some still wait in the socket.
        """
        now, stands = time.monotonic(), self._next == self._reached
        late = self._next < self._expected and now - self._restarted_at >= RETRY_S
        if self._caught_up and stands and late:
            self.task.cancel()
            self.task, self._restarted_at = asyncio.create_task(self._listen()), now
        self._expected, self._reached = next_number, self._next

    async def _listen(self) -> None:
        while True:
            try:
                with _socket(zmq.SUB, self._events) as socket:
                    socket.subscribe(b"")
                    await self._replay()
                    while True:
                        _, *frames = await socket.recv_multipart()
                        if not self._take(frames):
                            await self._replay()
                            self._take(frames)
                        await asyncio.sleep(0)  # requests have their turn
            except TimeoutError:
                why = f"no replay from {self._replays} within {REPLAY_DEADLINE_S:g} s"
            except zmq.ZMQError as error:
                why = f"cannot listen at {self._events} and {self._replays}: {error}"
            except (NodeFailed, OverflowError) as error:
                why = str(error)
            self._index.doubt(self._url)
            if why != self._failure:
                _log.warning(
                    "node %s: KV events: %s; choosing by what was sent there", self._url, why
                )
            self._failure = why
            await asyncio.sleep(RETRY_S)

    async def _replay(self) -> None:
        self._caught_up = False
        with _socket(zmq.DEALER, self._replays) as socket:
            async with asyncio.timeout(REPLAY_DEADLINE_S):
                await socket.send_multipart((b"", packed_number(self._next)))
                while True:
                    _, *frames = await socket.recv_multipart()
                    if frames and frames[0] == END:
                        break
                    if not self._take(frames):
                        raise NodeFailed("batches are missing in the replay")
                    await asyncio.sleep(0)
        self._caught_up, self._failure = True, ""
        self._index.trust(self._url)

    def _take(self, frames: Sequence[bytes]) -> bool:
        """Take a batch unless it is known; return False if others are missing before it."""
        if len(frames) != 2:
            raise NodeFailed(f"they come in 3 frames, got {len(frames) + 1}")
        number, batch = number_of(frames[0]), read_batch(frames[1])
        if number > self._next and not is_snapshot(batch):
            return False
        if number < self._next:
            return True
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._index.stored(self._url, keys_of(event.block_hashes))
                self._blocks.inc(len(event.block_hashes))
            elif isinstance(event, BlockRemoved):
                self._index.removed(self._url, keys_of(event.block_hashes))
                self._blocks.inc(len(event.block_hashes))
            else:
                self._index.clear(self._url)
        self._next = number + 1
        return True


def _socket(kind: int, address: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    try:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.RCVHWM, _MAX_AHEAD),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
        ):
            socket.setsockopt(option, value)
        socket.connect(address)
    except BaseException:
        socket.close()
        raise
    return socket
