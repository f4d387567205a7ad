"""The backends of an engine on its ranks: rank 0 sees each as one, the others do as they are told.

Each rank has a backend on a thread of its own process, over its own pool. What the transfer engine
asks goes to each of them in parts; what they tell becomes one event. A peer is joined when all
parts are. A read has ended when all its parts have. It fails with the first part that does, and is
in flight until no part is: so long its blocks stay in quarantine.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from kvrelay.kv_transfer.backend import (
    AddPeer,
    BackendEvent,
    BackendJob,
    BackendThread,
    DropPeer,
    Joined,
    PeerGone,
    ReadEnded,
    ReadFailed,
    Source,
    TransferBackend,
    why_not,
)
from kvrelay.kv_transfer.checksums import Checksums
from kvrelay.kv_transfer.connector import PeerKey, PoolRegion, Read
from kvrelay.kv_transfer.ranks import (
    Broke,
    Close,
    Do,
    LinkAddress,
    LinkEnd,
    News,
    Open,
    Opened,
    Prepared,
    Serve,
    Stop,
    Sum,
    Summed,
    ToRank,
)
from kvrelay.wire.errors import ConfigError, KvrelayError

__all__ = ["AllRanksBackend", "LedBackends", "Part", "PartTable"]

log = logging.getLogger(__name__)

JOIN_S = 0.4


class Part(NamedTuple):
    """A part: our rank, and the process of the source's rank that it reads from."""

    rank: int
    source: PeerKey


@dataclass(slots=True)
class _Peer:
    parts: tuple[Part, ...]
    missing: set[Part]  # those that have not joined


@dataclass(slots=True)
class _Read:
    peer: PeerKey
    running: set[Part]
    error: KvrelayError | None = None


class PartTable:
    """A table of peers and reads in parts. Pure: no threads, no lock.

    A part's events come in order, those of different parts in any order.
    """

    def __init__(self) -> None:
        self._peers: dict[PeerKey, _Peer] = {}
        self._of: dict[Part, PeerKey] = {}
        # Joins that were asked for and not answered: of several, only the last answer is about this
        # attempt.
        self._asked: Counter[Part] = Counter()
        self._reads: dict[int, _Read] = {}

    def __len__(self) -> int:
        return len(self._peers) + len(self._reads)

    def add_peer(self, peer: PeerKey, parts: Sequence[Part]) -> None:
        """Begin to wait for the parts of a peer, each of which was asked to join."""
        self._peers[peer] = _Peer(tuple(parts), set(parts))
        self._of |= dict.fromkeys(parts, peer)
        self._asked.update(parts)

    def parts(self, peer: PeerKey) -> tuple[Part, ...]:
        """Return the parts of a peer; none if it is unknown."""
        known = self._peers.get(peer)
        return known.parts if known is not None else ()

    def drop_peer(self, peer: PeerKey) -> tuple[Part, ...]:
        """Forget a peer that nothing is read from. Returns its parts."""
        parts = self.parts(peer)
        self._peers.pop(peer, None)
        for part in parts:
            self._of.pop(part, None)
        return parts

    def read(self, read: Read) -> list[tuple[Part, Read]]:
        """Return what each part is to read. Raises KeyError for an unknown peer."""
        parts = self._peers[read.peer].parts
        self._reads[read.read_id] = _Read(read.peer, set(parts))
        return [(part, msgspec.structs.replace(read, peer=part.source)) for part in parts]

    def on_event(self, rank: int, event: BackendEvent) -> BackendEvent | None:
        """Return what a part's event means for the whole; None if nothing yet.

        After a Joined with an error `drop_peer` must follow at once, and its parts be told.
        """
        part = Part(rank, event.peer)
        if isinstance(event, Joined):
            return self._joined(part, event.error)
        read = self._reads.get(event.read_id)
        if read is None:
            return None
        error = event.error if isinstance(event, ReadFailed) else None
        first = read.error is None
        read.error = read.error or error
        if not (isinstance(event, ReadFailed) and event.in_flight):
            read.running.discard(part)
        if read.running:
            if error is None or not first:
                return None
            return ReadFailed(read.peer, event.read_id, error, in_flight=True)
        del self._reads[event.read_id]
        if read.error is not None:
            return ReadFailed(read.peer, event.read_id, read.error, in_flight=False)
        return ReadEnded(read.peer, event.read_id)

    def _joined(self, part: Part, error: KvrelayError | None) -> Joined | None:
        self._asked[part] -= 1
        if self._asked[part] > 0:
            return None
        del self._asked[part]
        peer = self._of.get(part)
        if peer is None:  # given up meanwhile
            return None
        missing = self._peers[peer].missing
        if error is None:
            missing.discard(part)
            if missing:
                return None
        return Joined(peer, error)


class AllRanksBackend:
    """A backend on all ranks, as if it were one. Public methods return at once, from any thread.

    The transfer engine calls with its lock held, and is called without ours: events may come in any
    order, but each once.
    """

    def __init__(self, tell: Callable[[BackendEvent], None]) -> None:
        self._tell = tell
        self._table = PartTable()
        self._lock = threading.Lock()
        self._ranks: list[Callable[[BackendJob], None]] = []

    def begin(self, ranks: Sequence[Callable[[BackendJob], None]]) -> None:
        """Give jobs to these backends, by rank."""
        self._ranks = list(ranks)

    def add_peer(self, peer: PeerKey, sources: Sequence[tuple[int, Source]]) -> None:
        """Have each rank get ready to read from its source. `Joined` follows."""
        parts = [
            Part(rank, PeerKey(peer.host, peer.port, source.generation)) for rank, source in sources
        ]
        with self._lock:
            self._table.add_peer(peer, parts)
        for part, (rank, source) in zip(parts, sources, strict=True):
            self._ranks[rank](AddPeer(part.source, source))

    def read(self, read: Read) -> None:
        """Read. `ReadEnded`, or `ReadFailed` until it is not in flight, follows."""
        with self._lock:
            reads = self._table.read(read)
        for part, its in reads:
            self._ranks[part.rank](its)

    def peer_gone(self, peer: PeerKey) -> None:
        """Note that the peer's process is gone; its other ranks have processes of their own."""
        with self._lock:
            parts = [part for part in self._table.parts(peer) if part.source == peer]
        for part in parts:
            self._ranks[part.rank](PeerGone(part.source))

    def drop_peer(self, peer: PeerKey) -> None:
        """Forget a peer; no read from it is in flight."""
        with self._lock:
            parts = self._table.drop_peer(peer)
        for part in parts:
            self._ranks[part.rank](DropPeer(part.source))

    def on_event(self, rank: int, event: BackendEvent) -> None:
        """Handle a rank's event."""
        with self._lock:
            whole = self._table.on_event(rank, event)
        if isinstance(whole, Joined) and whole.error is not None:
            self.drop_peer(whole.peer)  # the other parts have joined, or are about to
        if whole is not None:
            self._tell(whole)


class LedBackends:
    """A rank's backends, other than rank 0's, which leads them."""

    def __init__(
        self,
        rank: int,
        region: PoolRegion,
        backends: Mapping[str, TransferBackend],
        address: LinkAddress,
        lost: Callable[[str], None],
    ) -> None:
        """Prepares them and tells rank 0. `lost` is called, from another thread, if rank 0 is."""
        self._threads: dict[str, BackendThread] = {}
        self._serving = False
        missing = {}
        for kind, backend in backends.items():
            thread = BackendThread(
                backend, partial(self._tell, kind), lambda: self._serving, self._broke
            )
            try:
                thread.start()
            except ConfigError as error:
                log.info("no KV by %s on rank %d: %s", kind, rank, error.message)
                missing[kind] = error.message
            else:
                self._threads[kind] = thread
        self._checksums: Checksums | None = None
        if address.terms.summed_heads:
            self._checksums = Checksums(region, address.terms.summed_heads, self._broke)
        self.link = LinkEnd(address, self._on_message, lost)
        self.link.send(Prepared(rank, region, missing))

    def close(self) -> None:
        self.link.close(JOIN_S)
        self._end()

    def _end(self) -> None:
        for thread in self._threads.values():
            thread.stop()
        for thread in self._threads.values():
            thread.close(JOIN_S)
        if self._checksums is not None:
            self._checksums.close(JOIN_S)

    def _tell(self, kind: str, event: BackendEvent) -> None:
        self.link.send(News(kind, event))

    def _broke(self, error: Exception) -> None:
        self.link.send(Broke(f"{type(error).__name__}: {error}"))

    def _opened(self, kind: str, card: bytes | Exception) -> None:
        if isinstance(card, Exception):
            self.link.send(Opened(kind, None, why_not(card)))
        else:
            self.link.send(Opened(kind, card))

    def _on_message(self, message: ToRank) -> None:
        match message:
            case Open(kind):
                self._threads[kind].open(partial(self._opened, kind))
            case Stop(kind):
                if (thread := self._threads.pop(kind, None)) is not None:
                    thread.stop()
            case Do(kind, job):
                self._threads[kind].do(job)
            case Sum(number, blocks):
                assert self._checksums is not None
                self._checksums.ask(blocks, lambda sums: self.link.send(Summed(number, sums)))
            case Serve(on):
                self._serving = on
                for thread in self._threads.values():
                    thread.nudge()
            case Close():
                self._end()
