"""Leases on cached blocks that no request offers: a reader's asks, and those of a source's callers.

Pure: times are arguments. A source that is asleep does not answer; each ask has a deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv_transfer.connector import (
    CachedAsked,
    Doubted,
    Granted,
    LeaseId,
    PeerKey,
    lease_of,
    peer_of,
)
from kvrelay.kv_transfer.fetch import NEVER
from kvrelay.kv_transfer.messages import End, LeaseCached, Leased
from kvrelay.kv_transfer.tickets import asking_refusal
from kvrelay.wire.errors import Incompatible, KvrelayError, TransferTimeout
from kvrelay.wire.transfer import MAX_POOL_BLOCKS, Source, Ticket

__all__ = ["MOST_ASKED", "NOT_HELD", "Asks", "Callers"]

HASH_BYTES = 16
MOST_ASKED = 60_000
"""Blocks in an ask; their hashes fill a message."""
_MOST_OF_A_CALLER = 64  # asks that the step loop has not answered
NOT_HELD = "NotHeld"
"""A cause: the peer has no such block."""


@dataclass(slots=True)
class _Ask:
    request_id: str
    peer: PeerKey
    message: LeaseCached
    deadline: float
    sent: bool = False


class Asks:
    """A reader's asks. Each has one Granted, unless it is cancelled."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.events: list[Granted] = []
        self.failures: Counter[str] = Counter()
        """Asks without a ticket, by the name of an error or NOT_HELD."""
        self._asks: dict[int, _Ask] = {}
        self._tokens = 0

    def begin(
        self,
        request_id: str,
        source: Source,
        hashes: Sequence[bytes],
        first: int,
        deadline: float,
    ) -> bool:
        """Begin an ask; False if it may not go to this source."""
        self._tokens += 1
        peer = peer_of(source)
        message = LeaseCached(self._tokens, peer.generation, first, b"".join(hashes[:MOST_ASKED]))
        self._asks[self._tokens] = ask = _Ask(request_id, peer, message, deadline)
        if refused := asking_refusal(peer, source.seal, self._secret):
            self._fail(ask, Incompatible(refused))
        return not refused

    def to_send(self, peer: PeerKey) -> list[LeaseCached]:
        unsent = [ask for ask in self._asks.values() if ask.peer == peer and not ask.sent]
        for ask in unsent:
            ask.sent = True
        return [ask.message for ask in unsent]

    def answered(self, peer: PeerKey, answer: Leased) -> LeaseId | None:
        """Handle a peer's answer; return a lease that nobody wants any more."""
        ask, ticket = self._asks.get(answer.token), answer.ticket
        if ask is None or ask.peer != peer:
            return None if ticket is None else lease_of(ticket)
        if ticket is None:
            cause = Incompatible.__name__ if answer.refused else NOT_HELD
            self._end(ask, None, cause, answer.refused)
        elif not _fits(ticket, ask):
            self._fail(ask, Incompatible("the ticket is not about what was asked for"))
            return lease_of(ticket)
        else:
            self._end(ask, ticket)
        return None

    def cancel(self, request_id: str) -> list[tuple[PeerKey, End]]:
        """Forget an ask; return what to tell its peer. A ticket that comes later is given back."""
        asks = self._asks.items()
        self._asks = {token: ask for token, ask in asks if ask.request_id != request_id}
        tickets = [event.ticket for event in self.events if event.request_id == request_id]
        self.events = [event for event in self.events if event.request_id != request_id]
        return [(peer_of(ticket), End(lease_of(ticket), 0)) for ticket in tickets if ticket]

    def peer_lost(self, peer: PeerKey, error: KvrelayError) -> None:
        for ask in [each for each in self._asks.values() if each.peer == peer]:
            self._fail(ask, error)

    def tick(self, now: float) -> None:
        for ask in [each for each in self._asks.values() if each.deadline <= now]:
            self._fail(ask, TransferTimeout("no answer in time"))

    def next_deadline(self) -> float:
        return min((ask.deadline for ask in self._asks.values()), default=NEVER)

    def _fail(self, ask: _Ask, error: KvrelayError) -> None:
        self._end(ask, None, type(error).__name__, error.message)

    def _end(self, ask: _Ask, ticket: Ticket | None, cause: str = "", why: str = "") -> None:
        del self._asks[ask.message.token]
        if ticket is None:
            self.failures[cause] += 1
        self.events.append(Granted(ask.request_id, ticket, f"{cause}: {why}" if why else cause))


class Callers:
    """A source's unanswered asks, by the id that a lease would have."""

    def __init__(self) -> None:
        self.events: list[CachedAsked | Doubted] = []
        self._asked: dict[str, tuple[bytes, LeaseCached]] = {}
        self._count = 0

    def asked(self, caller: bytes, ask: LeaseCached) -> Leased | None:
        """Hand an ask to the step loop, or return a refusal."""
        refused = ""
        if not 0 < len(ask.hashes) <= MOST_ASKED * HASH_BYTES or len(ask.hashes) % HASH_BYTES:
            refused = f"{len(ask.hashes)} bytes are no hashes of 1 to {MOST_ASKED} blocks"
        if not 0 <= ask.first < MAX_POOL_BLOCKS:
            refused = f"first is {ask.first}, and blocks have numbers up to {MAX_POOL_BLOCKS}"
        if sum(caller == each for each, _ in self._asked.values()) >= _MOST_OF_A_CALLER:
            refused = f"{_MOST_OF_A_CALLER} asks of yours wait; ask again later"
        if refused:
            return Leased(ask.token, None, refused)
        self._count += 1
        request_id = f"cached.{self._count}"
        self._asked[request_id] = caller, ask
        starts = range(0, len(ask.hashes), HASH_BYTES)
        hashes = [ask.hashes[start : start + HASH_BYTES] for start in starts]
        self.events.append(CachedAsked(request_id, hashes))
        return None

    def take(self, request_id: str) -> tuple[bytes, LeaseCached]:
        """Return who has asked what. Raises KeyError for what is answered."""
        return self._asked.pop(request_id)


def _fits(ticket: Ticket, ask: _Ask) -> bool:
    most = len(ask.message.hashes) // HASH_BYTES
    complete = peer_of(ticket) == ask.peer and not ticket.growing
    return complete and 0 < ticket.blocks_each() <= most
