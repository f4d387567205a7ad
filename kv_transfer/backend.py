"""A transfer backend: what moves bytes, and the one thread that it lives on.

Blocks may be used again only when nothing can land in them, so the thread polls each read to its
end, whoever wants it:

- direct: our own copies always end; a read never breaks.
- NCCL: bytes land in staging, and who ends a pair locks the pool: a failed read is over at once.
- NIXL: a read is many operations of UCX. Disconnected: none goes on but copies of our own GPU.
  After any other error the read is *broken*: its other parts may land. With a stopped peer a read
  hangs, and lands later (seen: after the release of its handle, too).

A connection that ends proves nothing; a process that is gone does (`peer_gone`).
"""

from __future__ import annotations

import collections
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvrelay.kv_transfer.connector import BlockIds, OnError, PeerKey, PoolRegion, Read, Tagged
from kvrelay.kv_transfer.shares import Share
from kvrelay.wire.errors import KvrelayError, PeerLost, TransferError

__all__ = [
    "TransferBackend",
    "AddPeer",
    "BackendEvent",
    "BackendJob",
    "DropPeer",
    "Joined",
    "Open",
    "Opened",
    "PeerGone",
    "ReadEnded",
    "BackendThread",
    "Source",
    "wake_in_time",
    "runs",
]

log = logging.getLogger(__name__)

# How often reads are polled, a twentieth longer each time. A long one needs progress: 64 MiB over
# UCX's TCP on loopback took 42 to 58 ms with at most 1 ms, 71 to 114 ms with 5.
POLL_MIN_S, POLL_MAX_S, POLL_GROWTH = 0.00005, 0.001, 1.05
# How long a broken read is waited for: TCP gives up after 15 minutes, RDMA after seconds.
BROKEN_S = 1000.0
# How often a backend is progressed that peers read by, and any other.
SERVE_S, IDLE_S = 0.002, 0.05


@dataclass(frozen=True, slots=True)
class Source:
    """A process to read from; `metadata` is from its backend's `open`."""

    engine_id: str
    generation: str
    region: PoolRegion
    metadata: bytes
    share: Share | None = None
    """The parts of each block that are read; None: all of it."""

    @property
    def part(self) -> Share:
        return self.share or Share(0, 0, self.region.block_bytes)


class TransferBackend(Protocol):
    """A way to read the memory of other processes. Called from one thread.

    Peers are named by generations, added before and dropped after all of their reads.
    """

    helps_readers: bool
    """True if peers that read from here need `progress`."""

    def prepare(self) -> None:
        """Load what `open` will need, without listening. Raises ConfigError."""

    def open(self) -> bytes:
        """Take devices, memory and sockets; return the metadata that peers need.

        Raises ConfigError, and has given everything back then.
        """

    def add_peer(self, source: Source) -> None:
        """Get ready to read from a peer. Raises TransferError."""

    def post_read(self, source: Source, remote_blocks: BlockIds, local_blocks: BlockIds) -> object:
        """Start to read; return a handle for `poll`. Raises TransferError if nothing has begun."""

    def poll(self, handle: object) -> bool:
        """Return True when all bytes are in.

        Raises PeerLost if no byte will land any more, another TransferError if some may. A handle
        is polled until True or PeerLost, or for `BROKEN_S` after another error. After PeerLost the
        peer is dropped and added again before the next read.
        """

    def peer_gone(self, generation: str) -> None:
        """Note that a process is gone for certain: `poll` soon ends what needed its help."""

    def drop_peer(self, generation: str) -> None: ...

    def progress(self) -> None:
        """Serve peers that read from here; called at least every `IDLE_S`."""

    def close(self) -> None: ...


class Open(Tagged, frozen=True):
    """A job: open the backend, if it is not open. Opened follows."""


class AddPeer(Tagged, frozen=True):
    """A job: get ready to read from a process. Joined follows, with the same `attempt`."""

    peer: PeerKey
    source: Source
    attempt: int


class PeerGone(Tagged, frozen=True):
    """A job: the peer's process is gone for certain."""

    peer: PeerKey


class DropPeer(Tagged, frozen=True):
    """A job: no read from this peer is in flight, or comes before the next AddPeer."""

    peer: PeerKey


class Opened(Tagged, frozen=True):
    """An event: the metadata that peers need, or None and why the backend is missing."""

    metadata: bytes | None
    why: str = ""


class Joined(Tagged, frozen=True):
    """An event: reads from this peer may be posted, or (`error`) never will be."""

    peer: PeerKey
    attempt: int
    error: KvrelayError | None = None


class ReadEnded(Tagged, frozen=True):
    """An event: all bytes of a read are in, or it broke.

    `in_flight`: bytes may still land; another event follows.
    """

    peer: PeerKey
    read_id: int
    error: KvrelayError | None = None
    in_flight: bool = False


BackendJob = Open | AddPeer | Read | PeerGone | DropPeer
BackendEvent = Opened | Joined | ReadEnded


@dataclass(slots=True)
class _Running:
    read: Read
    handle: object
    broken_at: float | None = None


class BackendThread:
    """A thread that runs a backend. All but `start` and `close` return at once."""

    def __init__(
        self,
        backend: TransferBackend,
        tell: Callable[[BackendEvent], None],
        on_error: OnError,
    ) -> None:
        """`tell`, and `on_error` at an unexpected end, are called from the thread."""
        self._backend = backend
        self._tell, self._on_error = tell, on_error
        # SimpleQueue.get() with a timeout may never return (CPython 3.10 to 3.12).
        self._todo: collections.deque[BackendJob] = collections.deque()
        self._woken = threading.Event()
        self._sources: dict[str, Source] = {}  # by generation: a process may have two addresses
        self._running: list[_Running] = []
        self._closing = False
        self._interval_s = POLL_MIN_S
        self._turned_at = time.monotonic()
        self._prepared: Future[None] = Future()
        self._metadata: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="kv-backend", daemon=True)

    def start(self) -> None:
        """Start the thread and prepare the backend. Raises what its `prepare` raised."""
        self._thread.start()
        self._prepared.result()

    def do(self, job: BackendJob) -> None:
        self._todo.append(job)
        self._woken.set()

    def silent_s(self) -> float:
        return time.monotonic() - self._turned_at

    def stop(self) -> None:
        self._closing = True
        self._woken.set()

    def close(self, timeout_s: float) -> None:
        self.stop()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        wake_in_time()
        try:
            self._backend.prepare()
        except Exception as error:  # noqa: BLE001 - raised again by start()
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # The edge of this thread: the step loop must hear of it.
            log.exception("a transfer backend ended")
            self._on_error(error)
        finally:
            if self._metadata is not None:
                self._backend.close()

    def _open(self) -> Opened:
        if self._metadata is None:
            try:
                self._metadata = self._backend.open()
            except KvrelayError as error:
                return Opened(None, error.message)
            except Exception as error:  # noqa: BLE001 - the listener decides what it means
                return Opened(None, f"{type(error).__name__}: {error}")
        return Opened(self._metadata)

    def _turn(self) -> None:
        self._turned_at = time.monotonic()
        if not self._todo and self._woken.wait(self._wait_s()):
            self._woken.clear()
        if self._todo:
            self._carry_out(self._todo.popleft())
        if self._metadata is not None:
            self._backend.progress()
            self._running = [running for running in self._running if not self._ended(running)]

    def _wait_s(self) -> float:
        if self._running:
            self._interval_s = min(POLL_MAX_S, self._interval_s * POLL_GROWTH)
            return self._interval_s
        return SERVE_S if self._backend.helps_readers and self._metadata is not None else IDLE_S

    def _carry_out(self, job: BackendJob) -> None:
        match job:
            case Open():
                self._tell(self._open())
            case AddPeer():
                self._tell(Joined(job.peer, job.attempt, self._add_peer(job)))
            case Read():
                self._post(job)
            case PeerGone(peer):
                self._backend.peer_gone(peer.generation)
            case DropPeer(peer):
                if self._sources.pop(peer.generation, None) is not None:
                    self._backend.drop_peer(peer.generation)

    def _add_peer(self, job: AddPeer) -> TransferError | None:
        peer, source, started = job.peer, job.source, time.monotonic()
        if peer.generation not in self._sources:
            try:
                self._backend.add_peer(source)
            except TransferError as error:
                return error
            self._sources[peer.generation] = source
        took_s = time.monotonic() - started
        log.info("joined %s at %s:%d in %.3f s", source.engine_id, peer.host, peer.port, took_s)
        return None

    def _post(self, read: Read) -> None:
        try:
            source = self._sources.get(read.peer.generation)
            if source is None:
                raise TransferError(f"peer {read.peer.generation} is not there any more")
            num_blocks = source.region.num_blocks
            if not all(0 <= block < num_blocks for block in read.remote_blocks):
                raise TransferError(
                    f"blocks {list(read.remote_blocks)} reach outside a pool of {num_blocks} blocks"
                )
            handle = self._backend.post_read(source, read.remote_blocks, read.local_blocks)
        except TransferError as error:
            self._tell(ReadEnded(read.peer, read.read_id, error))
            return
        self._running.append(_Running(read, handle))
        self._interval_s = POLL_MIN_S

    def _ended(self, running: _Running) -> bool:
        read, now = running.read, time.monotonic()
        try:
            if not self._backend.poll(running.handle):
                return False
        except TransferError as error:
            first = running.broken_at is None
            if running.broken_at is None:
                running.broken_at = now
            in_flight = not isinstance(error, PeerLost)
            if in_flight and now - running.broken_at >= BROKEN_S:
                in_flight = False
                says = "a READ of %d blocks from %s:%d broke %g s ago: its blocks leave quarantine"
                where = read.peer.host, read.peer.port
                log.warning(f"{says}, its end unseen", len(read.local_blocks), *where, BROKEN_S)
            if first or not in_flight:
                self._tell(ReadEnded(read.peer, read.read_id, error, in_flight))
            return not in_flight
        self._tell(ReadEnded(read.peer, read.read_id))
        return True


def runs(remote: BlockIds, local: BlockIds) -> Iterator[tuple[int, int, int]]:
    """Yield (remote, local, count) of blocks that follow one another on both sides."""
    first = 0
    for at in range(1, len(remote) + 1):
        count = at - first
        if at == len(remote) or (remote[at], local[at]) != (
            remote[first] + count,
            local[first] + count,
        ):
            yield remote[first], local[first], count
            first = at


_PR_SET_TIMERSLACK, _NANOSECONDS = 29, 1000


def wake_in_time() -> None:
    """Have this thread sleep 1 us longer than it asks for, not Linux's usual 50."""
    with suppress(OSError, AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _NANOSECONDS, 0, 0, 0)
