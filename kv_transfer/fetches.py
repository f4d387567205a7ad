"""Fetches of a reader: what each watched request waits for, and when its KV is admitted. Pure.

The fences. A READ *starts* only while the lease is surely held: the last acknowledged renewal was
sent less than a lease (minus a margin) ago by our clock. So no READ is posted towards a source that
went silent, whose bytes could land at any later time. KV is *admitted* only when the source
confirms, after the last byte, that it held the lease until then. Our clock alone would not do: a
source may end a lease early, and a reader that slept cannot tell what was overwritten meanwhile.

Verification. What was read is right if the source held the lease at any later time. So blocks are
*verified* by a renewal that was sent after the end of their READ and acknowledged as kept. A failed
fetch says how many of its first blocks are verified: those need not be computed again.

Growth. A growing ticket names all its blocks, of which the first `ready` can be read. Each READ
takes what was announced since the last one. Until the KV is complete, the deadline is that of the
source's next renewal: a prompt may take as long as it takes.

Checks. A share of the blocks is drawn (kv_transfer/checksums.py) and compared with the source's
checksums. The source is asked as each READ begins, and is let go when it has answered: before that
nothing it sums may be overwritten. The exit fence comes first: bytes that differ because the lease
was lost are LeaseLost, and only what the source held until the end is KvCorrupted. Of that nothing
is kept, and nothing behind a drawn block that is not compared yet.

Quarantine. A failed or cancelled fetch whose READ is in flight is Settled only when the backend has
said that nothing of it can land any more: NIXL hands back a cancelled handle and goes on writing
(seen: 969 of 1024 MiB landed after the release).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvrelay.kv_transfer.checksums import MOST_BLOCKS, drawn
from kvrelay.kv_transfer.connector import (
    Ask,
    Command,
    Completion,
    End,
    Fetched,
    FetchFailed,
    LeaseId,
    PeerKey,
    Read,
    Settled,
    Sum,
    Verify,
)
from kvrelay.kv_transfer.fetch import Fetch, FetchLimits, State
from kvrelay.wire.errors import KvCorrupted, KvrelayError, LeaseLost, PeerLost, TransferTimeout

__all__ = ["FetchTable", "sentence"]


def sentence(error: KvrelayError) -> str:
    """Return the reason of a FetchFailed: kind of error, then its message."""
    return f"{type(error).__name__}: {error.message}"


class FetchTable:
    """A reader's fetches. Each ends once: Fetched, or (FetchFailed or cancel and) Settled."""

    def __init__(self, limits: FetchLimits, checked_share: float = 0.0) -> None:
        self.limits = limits
        self._checked_share = checked_share
        self.events: list[Fetched | FetchFailed | Settled] = []
        self.commands: list[Command] = []
        self.fetched = 0
        self.failures: Counter[str] = Counter()  # by kind of error
        self.retries = 0
        self.fetched_bytes = 0
        self.fetch_s = 0.0
        self._fetches: dict[str, Fetch] = {}
        self.checked_blocks = 0
        self.wrong_blocks = 0
        self.unchecked_blocks = 0
        self._ready: set[PeerKey] = set()
        self._vouching: set[PeerKey] = set()
        self._reads = 0

    def watch(
        self, request_id: str, peer: PeerKey, lease: LeaseId, growing: int | None = None
    ) -> None:
        """Begin to renew a lease. `growing`: number of blocks, if the KV is not complete.

        Raises ValueError if the request is watched, or not settled yet.
        """
        if request_id in self._fetches:
            raise ValueError(
                f"request {request_id!r} is already {self._fetches[request_id].state.name.lower()}"
            )
        fetch = Fetch(request_id, peer, lease, self.limits)
        fetch.growing, fetch.blocks, fetch.complete = (
            growing is not None,
            growing or 0,
            growing is None,
        )
        self._fetches[request_id] = fetch

    def doom(self, request_id: str, error: KvrelayError) -> None:
        """Have the fetch of a watched request fail at once."""
        self._lose(self._fetches[request_id], error)

    def fetch(
        self, request_id: str, remote_blocks: Sequence[int], local_blocks: Sequence[int], now: float
    ) -> None:
        """Fetch the KV of a watched request; no blocks means that all of it was cached.

        Raises ValueError if the request is not watched, or asks twice, or the lists differ in
        length.
        """
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.state is not State.WATCHED:
            raise ValueError(
                f"request {request_id!r} is {fetch.state.name.lower() if fetch else 'not watched'}"
            )
        if len(remote_blocks) != len(local_blocks):
            raise ValueError(
                f"{len(remote_blocks)} remote blocks for {len(local_blocks)} local ones"
            )
        if fetch.growing and len(remote_blocks) > fetch.blocks:
            raise ValueError(f"{len(remote_blocks)} blocks of a ticket for {fetch.blocks}")
        fetch.remote_blocks, fetch.local_blocks = tuple(remote_blocks), tuple(local_blocks)
        fetch.asked_at = now
        fetch.state = State.WAITING
        if fetch.complete:
            fetch.hurry(now)
        if not local_blocks and not fetch.growing:
            self._end_lease(fetch)
            self._finish(fetch, now)
        elif fetch.lost is not None:
            self._fail(fetch, fetch.lost)
        else:
            self._start(fetch, now)

    def cancel(self, request_id: str) -> None:
        """End a request; it gets no Fetched or FetchFailed any more."""
        for event in self.events:
            if isinstance(event, Fetched | FetchFailed) and event.request_id == request_id:
                self.events.remove(event)
                if isinstance(event, Fetched):
                    # To the caller the fetch was still running, so it waits for Settled.
                    self.events.append(Settled(request_id))
                return
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.state is State.ABANDONED:
            return
        if not fetch.released:  # else it is on its way
            self._end_lease(fetch)
        if fetch.state is State.WATCHED:
            del self._fetches[request_id]
        else:
            self._abandon(fetch)

    def peer_ready(self, peer: PeerKey, now: float, *, vouches: bool = False) -> None:
        """Allow reads from this peer; `vouches`: it gives checksums of its blocks."""
        self._ready.add(peer)
        if vouches:
            self._vouching.add(peer)
        for fetch in self._of(peer):
            self._start(fetch, now)

    def peer_not_ready(self, peer: PeerKey) -> None:
        """Post no READ from this peer until `peer_ready`."""
        self._ready.discard(peer)

    def peer_lost(self, peer: PeerKey, error: KvrelayError) -> None:
        """Fail what needs this peer's answers. Its reads in flight end by themselves."""
        self._ready.discard(peer)
        self._vouching.discard(peer)
        for fetch in self._of(peer):
            if fetch.state is not State.CHECKING:  # else it has held all that we need of it
                self._lose(fetch, error)

    def grown(
        self, peer: PeerKey, lease: LeaseId, ready: int, completion: Completion | None, now: float
    ) -> None:
        """Note that the first `ready` blocks can be read; all of them, with a completion."""
        for fetch in self._of(peer):
            if fetch.lease != lease or fetch.complete:
                continue
            fetch.ready = min(fetch.blocks, max(fetch.ready, ready))
            if completion is not None:
                fetch.complete, fetch.completion, fetch.told_at = True, completion, now
                if fetch.state in (State.WAITING, State.READING):
                    fetch.hurry(now)
            self._start(fetch, now)

    def renewed(
        self,
        peer: PeerKey,
        kept: Iterable[LeaseId],
        lost: Iterable[LeaseId],
        sent_at: float,
        now: float,
    ) -> None:
        """Handle the peer's answer to the renewal that we sent at `sent_at`."""
        still, gone = set(kept), set(lost)
        for fetch in self._of(peer):
            if fetch.lease in still:
                fetch.kept(sent_at)
                self._start(fetch, now)
            elif fetch.lease in gone and not fetch.released:
                # Once released, the answer to the End decides: a renewal behind it in the queue
                # finds no lease.
                self._lose(fetch, self._lease_lost(fetch))

    def confirmed(self, peer: PeerKey, token: int, *, held: bool, now: float) -> None:
        """Handle the peer's answer to an End: whether it held the lease until then."""
        for fetch in self._of(peer):
            if fetch.state is not State.CONFIRMING or fetch.token != token:
                continue
            if held:
                self._admit(fetch, now)
            else:
                self._fail(fetch, self._lease_lost(fetch))

    def vouched(
        self, peer: PeerKey, lease: LeaseId, checksums: Mapping[int, bytes], now: float
    ) -> None:
        """Handle the peer's checksums of blocks of this lease, by its own ids."""
        for fetch in self._of(peer):
            if fetch.lease == lease:
                fetch.checks.add_theirs(checksums)
                self._start(fetch, now)

    def summed(self, number: int, checksums: Sequence[bytes], now: float) -> None:
        """Handle our own checksums, for which a Sum of this number has asked."""
        for fetch in list(self._fetches.values()):
            if fetch.checks.add_ours(number, checksums) and fetch.state is State.CHECKING:
                self._admit(fetch, now)

    def read_ended(self, read_id: int, now: float) -> None:
        """Handle the end of a READ: its bytes are in."""
        fetch = self._reading(read_id)
        if fetch is None:
            return
        landed_before, fetch.read_id, fetch.landed = fetch.landed, None, fetch.taken
        fetch.read_s += now - fetch.posted_at
        if fetch.state is State.ABANDONED:
            self._settle(fetch)
            return
        self._sum(fetch, fetch.checks.between(landed_before, fetch.landed))
        fetch.ends.append((now, fetch.landed))
        fetch.state = State.WAITING
        self._start(fetch, now)
        if fetch.state is not State.CONFIRMING:  # else the answer to its End is the proof
            self.commands.append(Verify(fetch.peer, fetch.lease))

    def read_failed(
        self, read_id: int, error: KvrelayError, now: float, *, in_flight: bool
    ) -> None:
        """Handle a broken READ. `in_flight`: bytes may still land, and another call follows.

        A READ is tried again once, if the peer is there and nothing of the first try is on its way.
        """
        fetch = self._reading(read_id)
        if fetch is None:
            return
        if not in_flight:
            fetch.read_id = None
        if fetch.state is State.READING:
            if not (in_flight or fetch.retried or isinstance(error, PeerLost)):
                self.retries += 1
                fetch.retried, fetch.taken, fetch.state = True, fetch.landed, State.WAITING
                self._start(fetch, now)
                return
            self._end_lease(fetch)
            self._fail(fetch, error)
        elif fetch.read_id is None:
            self._settle(fetch)

    def tick(self, now: float) -> None:
        """Fail what is past its deadline."""
        for fetch in list(self._fetches.values()):
            error = fetch.late(now)
            if error is None:
                continue
            if isinstance(error, TransferTimeout) and not fetch.released:
                self._end_lease(fetch)
            self._fail(fetch, error)

    def next_deadline(self) -> float | None:
        """Return when `tick` has something to do."""
        due = min((fetch.due for fetch in self._fetches.values()), default=float("inf"))
        return due if due < float("inf") else None

    def growing(self, peer: PeerKey) -> list[LeaseId]:
        """Return the leases whose progress we want to hear."""
        return [
            f.lease
            for f in self._of(peer)
            if not f.complete and f.lost is None and f.state is not State.ABANDONED
        ]

    def leases(self, peer: PeerKey) -> list[LeaseId]:
        """Return the leases to renew at this peer."""
        return [
            f.lease
            for f in self._of(peer)
            if f.lost is None and not f.released and f.state is not State.ABANDONED
        ]

    def unanswered(self, peer: PeerKey) -> list[Ask]:
        """Return questions for checksums that this peer has not answered."""
        asked = [(f, f.checks.unanswered) for f in self._of(peer) if f.state is not State.ABANDONED]
        return [Ask(peer, f.lease, tuple(blocks)) for f, blocks in asked if blocks]

    def reading(self, peer: PeerKey) -> bool:
        """Return whether bytes of this peer may still land here."""
        return any(f.read_id is not None for f in self._of(peer))

    def check(self) -> None:
        """Assert the invariants."""
        for fetch in self._fetches.values():
            fetch.check()
        reads = [f.read_id for f in self._fetches.values() if f.read_id is not None]
        assert len(reads) == len(set(reads))

    def _of(self, peer: PeerKey) -> list[Fetch]:
        return [f for f in self._fetches.values() if f.peer == peer]

    def _reading(self, read_id: int) -> Fetch | None:
        return next((f for f in self._fetches.values() if f.read_id == read_id), None)

    def _start(self, fetch: Fetch, now: float) -> None:
        if fetch.state is not State.WAITING:
            return
        announced = fetch.announced
        if fetch.taken < announced:
            if fetch.peer not in self._ready or now >= fetch.held_until:
                return
            self._reads += 1
            fetch.read_id, fetch.state = self._reads, State.READING
            part = slice(fetch.taken, announced)
            fetch.taken, fetch.posted_at = announced, now
            self.commands.append(
                Read(self._reads, fetch.peer, fetch.remote_blocks[part], fetch.local_blocks[part])
            )
            self._draw(fetch, part)
        elif fetch.complete and not fetch.checks.unanswered:
            self._reads += 1
            fetch.state, fetch.token = State.CONFIRMING, self._reads
            self._end_lease(fetch)

    def _draw(self, fetch: Fetch, part: slice) -> None:
        remote = fetch.remote_blocks[part]
        chosen = set(drawn(fetch.lease, remote, self._checked_share))
        places = {block: part.start + at for at, block in enumerate(remote) if block in chosen}
        if fetch.peer not in self._vouching:
            fetch.checks.unchecked.update(places.values())
        elif places:
            fetch.checks.places.update(places)
            self.commands.append(Ask(fetch.peer, fetch.lease, tuple(places)))

    def _sum(self, fetch: Fetch, places: Sequence[int]) -> None:
        for first in range(0, len(places), MOST_BLOCKS):
            some = places[first : first + MOST_BLOCKS]
            self._reads += 1
            fetch.checks.ask(self._reads, some)
            self.commands.append(
                Sum(self._reads, tuple(fetch.local_blocks[place] for place in some))
            )

    def _admit(self, fetch: Fetch, now: float) -> None:
        checks = fetch.checks
        if not checks.settled:
            fetch.state = State.CHECKING
            return
        self.checked_blocks += len(checks.places)
        self.unchecked_blocks += len(checks.unchecked)
        self.wrong_blocks += len(checks.wrong)
        if not checks.wrong:
            self._finish(fetch, now)
            return
        first = checks.wrong[0]
        self._fail(
            fetch,
            KvCorrupted(
                f"{len(checks.wrong)} of {len(checks.places)} blocks that were checked are not what"
                f" {fetch.peer.host}:{fetch.peer.port} has, the first of them its block "
                f"{fetch.remote_blocks[first]},"
                f" which is {fetch.local_blocks[first]} here; test the memory, GPUs and network "
                f"between the two"
            ),
        )

    def _end_lease(self, fetch: Fetch) -> None:
        if fetch.lost is None:
            self.commands.append(End(fetch.peer, fetch.lease, fetch.token))

    def _lease_lost(self, fetch: Fetch) -> LeaseLost:
        return LeaseLost(
            f"{fetch.peer.host}:{fetch.peer.port} no longer holds the blocks of request "
            f"{fetch.lease.request_id!r}:"
            f" released there, or not renewed for {self.limits.lease_s:g} s"
        )

    def _lose(self, fetch: Fetch, error: KvrelayError) -> None:
        if fetch.state is State.WATCHED:
            fetch.lost = fetch.lost or error
        elif fetch.state is not State.ABANDONED:
            self._fail(fetch, error)

    def _finish(self, fetch: Fetch, now: float) -> None:
        fetched = Fetched(
            fetch.request_id,
            fetch.num_bytes,
            now - fetch.asked_at,
            fetch.completion,
            exposed_s=now - fetch.exposed_at,
            read_s=fetch.read_s,
            told_at=fetch.told_at,
        )
        self.fetched += 1
        self.fetched_bytes += fetched.num_bytes
        self.fetch_s += fetched.exposed_s
        self.events.append(fetched)
        del self._fetches[fetch.request_id]

    def _fail(self, fetch: Fetch, error: KvrelayError) -> None:
        self.failures[type(error).__name__] += 1
        kept = int(min(fetch.verified, fetch.checks.sound))
        self.events.append(FetchFailed(fetch.request_id, sentence(error), kept))
        self._abandon(fetch)

    def _abandon(self, fetch: Fetch) -> None:
        if fetch.read_id is None:
            self._settle(fetch)
        else:
            fetch.state, fetch.lost = State.ABANDONED, None

    def _settle(self, fetch: Fetch) -> None:
        self.events.append(Settled(fetch.request_id))
        del self._fetches[fetch.request_id]
