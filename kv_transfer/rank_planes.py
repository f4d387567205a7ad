"""One data plane on all ranks of an engine, as the desk sees it: as if it were one.

Each rank has the plane on a thread of its own process, over its own pool. What the desk asks goes
to each of them in parts (`kv_transfer/parts.py`); what they tell becomes one answer. An engine of
one rank has its one thread here, and nothing between.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from kvrelay.kv_transfer.commands import PeerKey, Read
from kvrelay.kv_transfer.parts import Finished, Joined, Outcome, Part, PartTable
from kvrelay.kv_transfer.planes import PlaneDesk, PlaneThread, Source
from kvrelay.kv_transfer.rank_link import RankLink
from kvrelay.kv_transfer.rank_messages import AddPeer, DropPeer, PeerGone, Post
from kvrelay.wire.errors import KvrelayError

__all__ = ["PlaneEnd", "RankPlane", "RemotePlane"]


class PlaneEnd(Protocol):
    """One rank's plane; see PlaneThread."""

    def add_peer(self, peer: PeerKey, source: Source) -> None: ...
    def read(self, read: Read) -> None: ...
    def peer_gone(self, peer: PeerKey) -> None: ...
    def drop_peer(self, peer: PeerKey) -> None: ...


class RemotePlane:
    """A plane of another rank."""

    def __init__(self, kind: str, rank: int, link: RankLink) -> None:
        self._kind, self._rank, self._link = kind, rank, link

    def add_peer(self, peer: PeerKey, source: Source) -> None:
        self._link.tell(self._rank, AddPeer(self._kind, peer, source))

    def read(self, read: Read) -> None:
        self._link.tell(self._rank, Post(self._kind, read))

    def peer_gone(self, peer: PeerKey) -> None:
        self._link.tell(self._rank, PeerGone(self._kind, peer))

    def drop_peer(self, peer: PeerKey) -> None:
        self._link.tell(self._rank, DropPeer(self._kind, peer))


class _Ear:
    """What the thread of this process tells, as the news of a part."""

    def __init__(self, plane: RankPlane, desk: PlaneDesk) -> None:
        self._plane, self._desk = plane, desk

    def joined(self, peer: PeerKey, error: KvrelayError | None) -> None:
        self._plane.joined(Part(0, peer), error)

    def read_ended(self, peer: PeerKey, read_id: int) -> None:
        self._plane.read_ended(Part(0, peer), read_id)

    def read_failed(
        self, peer: PeerKey, read_id: int, error: KvrelayError, *, in_flight: bool
    ) -> None:
        self._plane.read_failed(Part(0, peer), read_id, error, in_flight=in_flight)

    def serving(self) -> bool:
        return self._desk.serving()

    def broke(self, error: Exception) -> None:
        self._desk.broke(error)


class RankPlane:
    """See the module. Public methods may be called from any thread and return at once.

    The desk calls with its lock held, and is called without ours: news may come in any order, but
    each once.
    """

    def __init__(self, desk: PlaneDesk) -> None:
        self._desk = desk
        self._table = PartTable()
        self._lock = threading.Lock()
        self._ends: list[PlaneEnd] = []
        self.ear: PlaneDesk = _Ear(self, desk)
        """For the thread of this process."""

    def begin(self, own: PlaneThread, others: Sequence[PlaneEnd]) -> None:
        """The planes of all ranks, ours first."""
        self._ends = [own, *others]

    def add_peer(self, peer: PeerKey, sources: Sequence[tuple[int, Source]]) -> None:
        """`sources`: which rank of ours reads from what. `joined` follows."""
        parts = [
            Part(rank, PeerKey(peer.host, peer.port, source.generation)) for rank, source in sources
        ]
        with self._lock:
            self._table.add_peer(peer, parts)
        for part, (rank, source) in zip(parts, sources, strict=True):
            self._ends[rank].add_peer(part.source, source)

    def read(self, read: Read) -> None:
        """`read_ended`, or `read_failed` until it is not in flight, follows."""
        with self._lock:
            reads = self._table.read(read)
        for part, its in reads:
            self._ends[part.rank].read(its)

    def peer_gone(self, peer: PeerKey) -> None:
        """The peer's process is gone for certain. Of its other ranks, which have their own, that
        says nothing.
        """
        with self._lock:
            parts = [part for part in self._table.parts(peer) if part.source == peer]
        for part in parts:
            self._ends[part.rank].peer_gone(part.source)

    def drop_peer(self, peer: PeerKey) -> None:
        """No read from this peer is in flight, and none will be asked for before the next
        `add_peer`.
        """
        with self._lock:
            parts = self._table.drop_peer(peer)
        for part in parts:
            self._ends[part.rank].drop_peer(part.source)

    def joined(self, part: Part, error: KvrelayError | None) -> None:
        """A part has joined, or never will."""
        with self._lock:
            outcome = self._table.joined(part, error)
            failed = outcome is not None and outcome.error is not None
            given_up = self._table.drop_peer(outcome.peer) if outcome is not None and failed else ()
        for other in given_up:  # has joined, or is about to
            self._ends[other.rank].drop_peer(other.source)
        self._tell(outcome)

    def read_ended(self, part: Part, read_id: int) -> None:
        """All bytes of a part are in."""
        with self._lock:
            outcome = self._table.read_ended(part, read_id)
        self._tell(outcome)

    def read_failed(
        self, part: Part, read_id: int, error: KvrelayError, *, in_flight: bool
    ) -> None:
        """A part broke."""
        with self._lock:
            outcome = self._table.read_failed(part, read_id, error, in_flight=in_flight)
        self._tell(outcome)

    def _tell(self, outcome: Outcome | None) -> None:
        if isinstance(outcome, Joined):
            self._desk.joined(outcome.peer, outcome.error)
        elif isinstance(outcome, Finished):
            self._desk.read_ended(outcome.peer, outcome.read_id)
        elif outcome is not None:
            self._desk.read_failed(
                outcome.peer, outcome.read_id, outcome.error, in_flight=outcome.in_flight
            )
