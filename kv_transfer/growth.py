"""How far offered KV has grown, and which reader wants to hear of it: the source's side of a
growing ticket. Pure.

Owns a line per lease and the news that are to be told; no clock, no sockets, no blocks. A reader
that follows a lease hears where it stands, and again each time it has grown. One reader at a time
follows a lease: a second one is there because the first has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv_transfer.connector import Completion
from kvrelay.kv_transfer.leases import LeaseId
from kvrelay.kv_transfer.messages import Grown

__all__ = ["GrowthTable"]


@dataclass(slots=True)
class _Growth:
    lease: LeaseId
    ready: int
    blocks: tuple[int, ...] = ()
    completion: Completion | None = None
    follower: bytes | None = None

    def news(self) -> Grown:
        return Grown(self.lease, self.ready, self.completion)


class GrowthTable:
    """`news` are messages to followers, by the name under which the control channel knows them."""

    def __init__(self) -> None:
        self.news: list[tuple[bytes, Grown]] = []
        self._growths: dict[str, _Growth] = {}

    def __len__(self) -> int:
        """Leases that are known here."""
        return len(self._growths)

    def begin(self, lease: LeaseId, ready: int, blocks: Sequence[int] = ()) -> None:
        """A lease was granted on these blocks, of which the first `ready` can be read."""
        self._growths[lease.request_id] = _Growth(lease, ready, tuple(blocks))

    def grow(self, request_id: str, ready: int) -> None:
        """The first `ready` blocks can be read. Unknown ids, and news that are none, are ignored."""
        growth = self._growths.get(request_id)
        if growth is not None and growth.completion is None and ready > growth.ready:
            growth.ready = ready
            self._tell(growth)

    def complete(self, request_id: str, ready: int, completion: Completion) -> None:
        """All blocks can be read, and this is what the request has generated. Unknown ids are
        ignored.
        """
        growth = self._growths.get(request_id)
        if growth is not None and growth.completion is None:
            growth.ready, growth.completion = ready, completion
            self._tell(growth)

    def follow(self, lease: LeaseId, follower: bytes) -> Grown | None:
        """A reader wants to hear: where it stands now, and from now on in `news`. None if the lease
        is not known.
        """
        growth = self._growths.get(lease.request_id)
        if growth is None or growth.lease != lease:
            return None
        growth.follower = follower
        return growth.news()

    def readable(self, lease: LeaseId) -> tuple[int, ...] | None:
        """The blocks that can be read under this lease; None if it is not known, or over."""
        growth = self._growths.get(lease.request_id)
        return (
            growth.blocks[: growth.ready] if growth is not None and growth.lease == lease else None
        )

    def vouch(self, lease: LeaseId, checksums: dict[int, bytes]) -> Grown | None:
        """What a reader is told that has asked for these, however the lease stands now; None if it
        is over.
        """
        growth = self._growths.get(lease.request_id)
        if growth is None or growth.lease != lease:
            return None
        return Grown(lease, growth.ready, growth.completion, checksums)

    def superseded(self, lease: LeaseId, reader: bytes) -> bool:
        """Whether another reader has followed this lease since."""
        growth = self._growths.get(lease.request_id)
        return (
            growth is not None and growth.lease == lease and growth.follower not in (None, reader)
        )

    def forget(self, request_id: str) -> None:
        """The lease has ended. Unknown ids are ignored."""
        self._growths.pop(request_id, None)

    def _tell(self, growth: _Growth) -> None:
        if growth.follower is not None:
            self.news.append((growth.follower, growth.news()))
