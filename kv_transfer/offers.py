"""Offers of the source side: which blocks are leased to readers, and how far their KV is. Pure.

A lease ends exactly once; while its KV grows it does not expire. A reader that follows an offer
hears where it stands, and each time it has grown. Only one reader follows: a second one means that
the first has failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvrelay.kv_transfer.checksums import MOST_BLOCKS
from kvrelay.kv_transfer.connector import BlockIds, Completion, LeaseId, Released, lease_of
from kvrelay.kv_transfer.fetch import NEVER
from kvrelay.kv_transfer.host_memory import LeaseWords
from kvrelay.kv_transfer.messages import ChunkProgress
from kvrelay.wire.transfer import Ticket

__all__ = ["Offer", "Offers"]


@dataclass(slots=True)
class Offer:
    """A ticket's leased blocks; without expiry it grows."""

    ticket: Ticket
    ready: int  # blocks that can be read
    expires_at: float = NEVER
    completion: Completion | None = None
    follower: bytes | None = None
    unwanted: bool = False
    """The reader has left while the KV grew, and no other has come."""
    asked: set[tuple[bytes, int]] = field(default_factory=set)
    """Blocks whose checksums are due to each reader."""

    @property
    def lease(self) -> LeaseId:
        return lease_of(self.ticket)

    def progress(self) -> ChunkProgress:
        return ChunkProgress(self.lease, self.ready, self.completion)


class Offers:
    """A source's offers. Times are seconds on one monotonic clock."""

    def __init__(self, lease_s: float, words: LeaseWords) -> None:
        """`words` show readers of this host which leases are held."""
        self.lease_s = lease_s
        self.events: list[Released] = []
        self.news: list[tuple[bytes, ChunkProgress]] = []
        """Messages to followers, by connection."""
        self.granted = 0
        self.released = 0
        self.expired = 0
        self._words = words
        # By request, in order of expiry: prolonged ones move to the end, and all leases are equally
        # long.
        self._offers: dict[str, Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, ticket: Ticket, ready: int, now: float) -> Ticket:
        """Lease the ticket's blocks; return it with the lease's epoch.

        Raises ValueError if the request has a lease.
        """
        request_id = ticket.remote_request_id
        if request_id in self._offers:
            raise ValueError(
                f"request {request_id!r} already has a lease; release it before offering it again"
            )
        self.granted += 1
        ticket = replace(ticket, lease_epoch=self.granted)
        expires_at = NEVER if ticket.growing else now + self.lease_s
        self._offers[request_id] = offer = Offer(ticket, ready, expires_at)
        self._words.begin(offer.lease.epoch)
        return ticket

    def grow(self, request_id: str, ready: int) -> None:
        """Note how many blocks of a growing offer can be read. Ignores other ids."""
        offer = self._growing(request_id)
        if offer is not None and ready > offer.ready:
            offer.ready = ready
            self._tell(offer)

    def complete(self, request_id: str, completion: Completion, now: float) -> Ticket | None:
        """Start a growing lease's time; return its complete ticket, None for other ids.

        An unwanted lease ends instead.
        """
        offer = self._growing(request_id)
        if offer is None:
            return None
        if offer.unwanted:
            self.release(request_id)
            return None
        offer.ticket = replace(offer.ticket, growing=False)
        offer.ready, offer.completion = len(offer.ticket.blocks), completion
        self._prolong(offer, now)
        self._tell(offer)
        return offer.ticket

    def follow(self, lease: LeaseId, reader: bytes) -> ChunkProgress | None:
        """Return where a lease stands (None: unknown); send `news` to this reader from now on."""
        offer = self.find(lease)
        if offer is None:
            return None
        offer.follower, offer.unwanted = reader, False
        return offer.progress()

    def ask(self, lease: LeaseId, reader: bytes, blocks: BlockIds) -> list[int] | None:
        """Return blocks whose checksums this reader is to hear; None if the lease is over.

        Left out are those beyond `MOST_BLOCKS`, unreadable ones, and those already due.
        """
        offer = self.find(lease)
        if offer is None:
            return None
        new = [block for block in dict.fromkeys(blocks) if (reader, block) not in offer.asked]
        if len(new) > MOST_BLOCKS or not set(new) <= set(offer.ticket.blocks[: offer.ready]):
            return []
        offer.asked.update((reader, block) for block in new)
        return new

    def vouch(
        self, lease: LeaseId, reader: bytes, checksums: dict[int, bytes]
    ) -> ChunkProgress | None:
        """Return the answer to `ask`; None if the lease is over. The reader may ask again."""
        offer = self.find(lease)
        if offer is None:
            return None
        offer.asked.difference_update((reader, block) for block in checksums)
        return replace(offer.progress(), checksums=checksums)

    def renew(self, leases: Iterable[LeaseId], now: float) -> tuple[list[LeaseId], list[LeaseId]]:
        """Prolong leases to `now + lease_s`. Returns (kept, lost)."""
        self.expire(now)
        kept: list[LeaseId] = []
        lost: list[LeaseId] = []
        for lease in dict.fromkeys(leases):
            offer = self.find(lease)
            (lost if offer is None else kept).append(lease)
            if offer is not None and offer.expires_at < NEVER:
                self._prolong(offer, now)
        return kept, lost

    def prolong(self, request_id: str, now: float) -> None:
        """Restart a lease's time, if it has one."""
        self.expire(now)
        offer = self._offers.get(request_id)
        if offer is not None and offer.expires_at < NEVER:
            self._prolong(offer, now)

    def end(self, lease: LeaseId, reader: bytes, now: float) -> bool:
        """End the lease for its reader; return whether it was held, complete, until now.

        A growing one goes on for another reader, until it is complete. A displaced reader ends
        nothing, but what it has read counts.
        """
        self.expire(now)
        offer = self.find(lease)
        if offer is None:
            return False
        grows, displaced = offer.expires_at == NEVER, offer.follower not in (None, reader)
        if grows:
            offer.unwanted = offer.unwanted or not displaced
        elif not displaced:
            self.release(lease.request_id)
        return not grows

    def release(self, request_id: str) -> None:
        """End a request's lease, whatever its epoch. Ignores unknown ids."""
        if request_id in self._offers:
            self.released += 1
            self._close(request_id, expired=False)

    def expire(self, now: float) -> None:
        while (first := self._first()) is not None and first.expires_at <= now:
            self.expired += 1
            self._close(first.lease.request_id, expired=True)

    def next_expiry(self) -> float:
        first = self._first()
        return NEVER if first is None else first.expires_at

    def find(self, lease: LeaseId) -> Offer | None:
        offer = self._offers.get(lease.request_id)
        return offer if offer is not None and offer.lease == lease else None

    def check(self) -> None:
        assert self.granted == self.released + self.expired + len(self)
        expiries = [o.expires_at for o in self._offers.values() if o.expires_at < NEVER]
        assert expiries == sorted(expiries)

    def _growing(self, request_id: str) -> Offer | None:
        offer = self._offers.get(request_id)
        return offer if offer is not None and offer.expires_at == NEVER else None

    def _first(self) -> Offer | None:
        return next((o for o in self._offers.values() if o.expires_at < NEVER), None)

    def _prolong(self, offer: Offer, now: float) -> None:
        offer.expires_at = now + self.lease_s
        self._offers[offer.lease.request_id] = self._offers.pop(offer.lease.request_id)

    def _tell(self, offer: Offer) -> None:
        if offer.follower is not None:
            self.news.append((offer.follower, offer.progress()))

    def _close(self, request_id: str, *, expired: bool) -> None:
        # Before the step loop may use the blocks again.
        self._words.end(self._offers.pop(request_id).lease.epoch)
        self.events.append(Released(request_id, expired))
