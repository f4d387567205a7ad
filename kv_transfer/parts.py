"""A peer and its reads in parts: each rank of ours reads from the ranks of the source that hold its
heads. Pure.

Owns what is known of the parts, and what they make together; no threads, no sockets, no lock. A
peer is joined when all parts are. A read has ended when all its parts have. It fails with the first
part that does, and is in flight until no part is: so long its blocks stay in quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvrelay.kv_transfer.commands import PeerKey, Read
from kvrelay.wire.errors import KvrelayError

__all__ = ["Failed", "Finished", "Joined", "Outcome", "Part", "PartTable"]


class Part(NamedTuple):
    """Our rank that reads, and the process of the source's rank that it reads from."""

    rank: int
    source: PeerKey


@dataclass(frozen=True, slots=True)
class Joined:
    """Reads from this peer may be posted, or (`error`) never will be."""

    peer: PeerKey
    error: KvrelayError | None


@dataclass(frozen=True, slots=True)
class Finished:
    """All bytes of a read are in."""

    peer: PeerKey
    read_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A read broke; `in_flight`: bytes may still land, and another outcome follows."""

    peer: PeerKey
    read_id: int
    error: KvrelayError
    in_flight: bool


Outcome = Joined | Finished | Failed


@dataclass(slots=True)
class _Peer:
    parts: tuple[Part, ...]
    missing: set[Part]
    """Those that have not joined."""


@dataclass(slots=True)
class _Read:
    peer: PeerKey
    running: set[Part]
    error: KvrelayError | None = None


class PartTable:
    """Peers and reads that are known here. A part's news come in order, those of different parts in
    any order.
    """

    def __init__(self) -> None:
        self._peers: dict[PeerKey, _Peer] = {}
        self._of: dict[Part, PeerKey] = {}
        self._asked: Counter[Part] = Counter()
        """Joins that were asked for and not answered: of several, only the last answer is about
        this attempt.
        """
        self._reads: dict[int, _Read] = {}

    def __len__(self) -> int:
        """Peers and reads."""
        return len(self._peers) + len(self._reads)

    def add_peer(self, peer: PeerKey, parts: Sequence[Part]) -> None:
        """Each part was asked to join."""
        self._peers[peer] = _Peer(tuple(parts), set(parts))
        self._of |= dict.fromkeys(parts, peer)
        self._asked.update(parts)

    def parts(self, peer: PeerKey) -> tuple[Part, ...]:
        """Those of a peer; none of one that is not known."""
        known = self._peers.get(peer)
        return known.parts if known is not None else ()

    def drop_peer(self, peer: PeerKey) -> tuple[Part, ...]:
        """Forget a peer that nothing is read from. Returns its parts."""
        parts = self.parts(peer)
        self._peers.pop(peer, None)
        for part in parts:
            self._of.pop(part, None)
        return parts

    def joined(self, part: Part, error: KvrelayError | None) -> Joined | None:
        """A part has joined, or never will. `drop_peer` must follow an error at once, and its parts
        be told.
        """
        self._asked[part] -= 1
        if self._asked[part] > 0:
            return None
        del self._asked[part]
        peer = self._of.get(part)
        if peer is None:  # given up meanwhile
            return None
        known = self._peers[peer]
        if error is not None:
            return Joined(peer, error)
        known.missing.discard(part)
        return Joined(peer, None) if not known.missing else None

    def read(self, read: Read) -> list[tuple[Part, Read]]:
        """What each part is to read. Raises KeyError for a peer that is not known."""
        parts = self._peers[read.peer].parts
        self._reads[read.read_id] = _Read(read.peer, set(parts))
        return [
            (part, read if part.source == read.peer else replace(read, peer=part.source))
            for part in parts
        ]

    def read_ended(self, part: Part, read_id: int) -> Finished | Failed | None:
        """All bytes of a part are in."""
        return self._over(part, read_id, None)

    def read_failed(
        self, part: Part, read_id: int, error: KvrelayError, *, in_flight: bool
    ) -> Finished | Failed | None:
        """A part broke; `in_flight`: its bytes may still land, and it is told of again."""
        if not in_flight:
            return self._over(part, read_id, error)
        read = self._reads.get(read_id)
        if read is None or read.error is not None:
            return None
        read.error = error
        return Failed(read.peer, read_id, error, in_flight=True)

    def _over(
        self, part: Part, read_id: int, error: KvrelayError | None
    ) -> Finished | Failed | None:
        """Nothing of this part will land any more."""
        read = self._reads.get(read_id)
        if read is None:
            return None
        read.running.discard(part)
        first, read.error = read.error is None, read.error or error
        if read.running:
            return (
                Failed(read.peer, read_id, error, in_flight=True)
                if error is not None and first
                else None
            )
        del self._reads[read_id]
        if read.error is not None:
            return Failed(read.peer, read_id, read.error, in_flight=False)
        return Finished(read.peer, read_id)
