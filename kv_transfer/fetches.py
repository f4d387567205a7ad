"""Fetches of the reader side: what each watched request waits for, and when its KV may be admitted. Pure: `now` is an
argument.

Owns the two fences and the quarantine; no clock, no sockets, no memory. What is to be done is left in `commands`, what
the step loop must know in `events`.

The fences. A READ *starts* only while the lease is surely held: the last acknowledged renewal was sent less than a
lease (minus a margin) ago by our clock. So no read is posted towards a source that went silent, whose bytes could land
at any later time. KV is *admitted* only when the source confirms, after the last byte, that it held the lease until
then. Our clock alone would not do for that: a source may end a lease early (its router released it), and a reader that
slept cannot tell from its own clock what was overwritten before it woke.

The proof. What was read is right if the source held the lease at any later time. So blocks of READs that have ended are
*proven* by a renewal that was sent after their end and acknowledged as kept; one is sent at once where more is to come.
A fetch that fails says how many of its first blocks are proven: those need not be computed again.

Growth. A growing ticket names all its blocks, of which the first `ready` can be read. Each READ takes what has been
announced since the last one, and the fetch ends when the KV is complete and read. Until then its deadline is that of
the source's next renewal: the prompt is being computed, and may take as long as it takes.

The quarantine. A failed or cancelled fetch whose READ is in flight is Settled only when the transfer was seen done or
disconnected: NIXL hands back a cancelled handle and goes on writing (seen: 969 of 1024 MiB landed after the release).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_transfer.connector import Completion, Fetched, FetchFailed, Settled
from kv_transfer.leases import LeaseId
from wire.errors import KvrelayError, LeaseLost, PeerLost, TransferTimeout

__all__ = ["Command", "End", "FetchLimits", "FetchTable", "PeerKey", "Prove", "Read", "sentence"]

# Part of the lease that the entry fence gives away to clock drift and to the way of an acknowledgement.
MARGIN = 0.1


class PeerKey(NamedTuple):
    """One process that we read from. A restarted one has a new generation, so it is another peer."""

    host: str
    port: int
    generation: str


@dataclass(frozen=True, slots=True)
class Read:
    """Command: read remote block i into local block i, and tell `read_ended`."""

    read_id: int
    peer: PeerKey
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Command: tell the peer that we are through with this lease; its answer goes to `confirmed` with this token."""

    peer: PeerKey
    lease: LeaseId
    token: int
    """A number of the fetch that waits for the answer; 0 if nobody does."""


@dataclass(frozen=True, slots=True)
class Prove:
    """Command: renew this lease now, not with the next heartbeat; its answer proves what has been read."""

    peer: PeerKey
    lease: LeaseId


Command = Read | End | Prove


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What bounds a fetch: it may take `deadline_s` plus its size at `floor_bytes_s`."""

    lease_s: float
    deadline_s: float
    floor_bytes_s: float
    block_bytes: int


class _State(enum.Enum):
    WATCHED = enum.auto()  # not asked for yet
    WAITING = enum.auto()  # asked for; the peer, its renewal or more of the KV is not there yet
    READING = enum.auto()  # a READ is in flight
    CONFIRMING = enum.auto()  # all bytes are in; the source's word is not
    ABANDONED = enum.auto()  # nobody wants the KV any more, but a READ is in flight


@dataclass(slots=True)
class _Fetch:
    request_id: str
    peer: PeerKey
    lease: LeaseId
    state: _State = _State.WATCHED
    held_until: float = float("-inf")  # entry fence
    lost: KvrelayError | None = None  # why a fetch would fail at once
    growing: bool = False  # the ticket was made before its KV was there
    blocks: int = 0  # in the ticket
    ready: int = 0  # of these, how many can be read
    completion: Completion | None = None
    complete: bool = True
    told_at: float | None = None  # of the completion
    read_id: int | None = None  # of the READ in flight
    taken: int = 0  # of our blocks, those whose READ was posted
    landed: int = 0  # and of these, those that are in
    ends: list[tuple[float, int]] = field(default_factory=list)  # of READs: when, and `landed` then; not proven yet
    proven: int = 0  # of those that are in, those which the source has held since
    retried: bool = False
    token: int = 0  # of the End that is to confirm it
    remote_blocks: tuple[int, ...] = field(default=())
    local_blocks: tuple[int, ...] = field(default=())
    asked_at: float = 0.0
    posted_at: float = 0.0  # of the last READ
    read_s: float = 0.0  # of all that have ended
    exposed_at: float = 0.0  # from here on nobody waits but for us
    deadline: float = float("inf")

    @property
    def announced(self) -> int:
        """Of our blocks, those that can be read: the ticket's last ones are ours, the others were cached here."""
        if self.complete:
            return len(self.local_blocks)
        return max(0, self.ready - (self.blocks - len(self.local_blocks)))


def sentence(error: KvrelayError) -> str:
    """The reason of a FetchFailed: kind of error, then its message."""
    return f"{type(error).__name__}: {error.message}"


class FetchTable:
    """All watched and running fetches of one reader. Every fetch ends in Fetched, or in FetchFailed or a cancel and
    then Settled; each exactly once."""

    def __init__(self, limits: FetchLimits) -> None:
        self.limits = limits
        self.events: list[Fetched | FetchFailed | Settled] = []
        self.commands: list[Command] = []
        self.fetched = 0
        self.failures: Counter[str] = Counter()  # by kind of error
        self.retries = 0
        self.fetched_bytes = 0
        self.fetch_s = 0.0
        self._fetches: dict[str, _Fetch] = {}
        self._ready: set[PeerKey] = set()
        self._reads = 0

    def watch(self, request_id: str, peer: PeerKey, lease: LeaseId, growing: int | None = None) -> None:
        """Begin to care for a lease. `growing`: how many blocks its KV will have; None: all of it is there.

        Raises ValueError if the request is watched, or not settled yet."""
        if request_id in self._fetches:
            raise ValueError(f"request {request_id!r} is already {self._fetches[request_id].state.name.lower()}")
        self._fetches[request_id] = _Fetch(
            request_id, peer, lease, growing=growing is not None, blocks=growing or 0, complete=growing is None
        )

    def doom(self, request_id: str, error: KvrelayError) -> None:
        """A watched request whose KV cannot be had: its fetch will fail at once."""
        self._lose(self._fetches[request_id], error)

    def fetch(self, request_id: str, remote_blocks: Sequence[int], local_blocks: Sequence[int], now: float) -> None:
        """The request wants its KV now; no blocks means it had all of it cached.

        Raises ValueError if the request is not watched, or asks twice, or the lists differ in length."""
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.state is not _State.WATCHED:
            raise ValueError(f"request {request_id!r} is {fetch.state.name.lower() if fetch else 'not watched'}")
        if len(remote_blocks) != len(local_blocks):
            raise ValueError(f"{len(remote_blocks)} remote blocks for {len(local_blocks)} local ones")
        if fetch.growing and len(remote_blocks) > fetch.blocks:
            raise ValueError(f"{len(remote_blocks)} blocks of a ticket for {fetch.blocks}")
        fetch.remote_blocks, fetch.local_blocks = tuple(remote_blocks), tuple(local_blocks)
        fetch.asked_at = now
        fetch.state = _State.WAITING
        if fetch.complete:
            self._hurry(fetch, now)
        if not local_blocks and not fetch.growing:
            self._end_lease(fetch)
            self._finish(fetch, now)
        elif fetch.lost is not None:
            self._fail(fetch, fetch.lost)
        else:
            self._start(fetch, now)

    def cancel(self, request_id: str) -> None:
        """The request is gone. What it has not seen yet of its fetch, it will not see."""
        for event in self.events:
            if isinstance(event, Fetched | FetchFailed) and event.request_id == request_id:
                self.events.remove(event)
                if isinstance(event, Fetched):
                    # To the caller the fetch was still running, so it waits for Settled.
                    self.events.append(Settled(request_id))
                return
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.state is _State.ABANDONED:
            return
        if fetch.state is not _State.CONFIRMING:  # else it is on its way
            self._end_lease(fetch)
        if fetch.state is _State.WATCHED:
            del self._fetches[request_id]
        else:
            self._abandon(fetch)

    def peer_ready(self, peer: PeerKey, now: float) -> None:
        """Reads from this peer can be posted."""
        self._ready.add(peer)
        for fetch in self._of(peer):
            self._start(fetch, now)

    def peer_lost(self, peer: PeerKey, error: KvrelayError) -> None:
        """This peer will not answer any more. Its reads in flight end by themselves."""
        self._ready.discard(peer)
        for fetch in self._of(peer):
            self._lose(fetch, error)

    def grown(self, peer: PeerKey, lease: LeaseId, ready: int, completion: Completion | None, now: float) -> None:
        """The first `ready` blocks of this lease can be read; all of them, if there is a completion."""
        for fetch in self._of(peer):
            if fetch.lease != lease or fetch.complete:
                continue
            fetch.ready = min(fetch.blocks, max(fetch.ready, ready))
            if completion is not None:
                fetch.complete, fetch.completion, fetch.told_at = True, completion, now
                if fetch.state in (_State.WAITING, _State.READING):
                    self._hurry(fetch, now)
            self._start(fetch, now)

    def renewed(
        self, peer: PeerKey, kept: Iterable[LeaseId], lost: Iterable[LeaseId], sent_at: float, now: float
    ) -> None:
        """The peer has answered the renewal that we sent at `sent_at`."""
        still, gone = set(kept), set(lost)
        for fetch in self._of(peer):
            if fetch.lease in still:
                fetch.held_until = max(fetch.held_until, sent_at + self.limits.lease_s * (1 - MARGIN))
                while fetch.ends and fetch.ends[0][0] < sent_at:
                    fetch.proven = fetch.ends.pop(0)[1]
                self._start(fetch, now)
            elif fetch.lease in gone and fetch.state is not _State.CONFIRMING:
                # While confirming, the answer to the End decides: a renewal behind it in the queue finds no lease.
                self._lose(fetch, self._lease_lost(fetch))

    def confirmed(self, peer: PeerKey, token: int, *, held: bool, now: float) -> None:
        """The peer has answered an End; `held` until that moment or not. The exit fence."""
        for fetch in self._of(peer):
            if fetch.state is not _State.CONFIRMING or fetch.token != token:
                continue
            if held:
                self._finish(fetch, now)
            else:
                self._fail(fetch, self._lease_lost(fetch))

    def read_ended(self, read_id: int, now: float) -> None:
        """All bytes of the READ are in."""
        fetch = self._reading(read_id)
        if fetch is None:
            return
        fetch.read_id, fetch.landed = None, fetch.taken
        fetch.read_s += now - fetch.posted_at
        if fetch.state is _State.ABANDONED:
            self._settle(fetch)
            return
        fetch.ends.append((now, fetch.landed))
        fetch.state = _State.WAITING
        self._start(fetch, now)
        if fetch.state is not _State.CONFIRMING:  # else the answer to its End is the proof
            self.commands.append(Prove(fetch.peer, fetch.lease))

    def read_failed(self, read_id: int, error: KvrelayError, now: float, *, in_flight: bool) -> None:
        """The READ broke. `in_flight`: bytes may still land, and `read_ended` or another `read_failed` follows.

        It is tried again once, where that can help: the peer is there, and nothing of the first try is on its way."""
        fetch = self._reading(read_id)
        if fetch is None:
            return
        if not in_flight:
            fetch.read_id = None
        if fetch.state is _State.READING:
            if not (in_flight or fetch.retried or isinstance(error, PeerLost)):
                self.retries += 1
                fetch.retried, fetch.taken, fetch.state = True, fetch.landed, _State.WAITING
                self._start(fetch, now)
                return
            self._end_lease(fetch)
            self._fail(fetch, error)
        elif fetch.read_id is None:
            self._settle(fetch)

    def tick(self, now: float) -> None:
        """Fail what is past its deadline."""
        for fetch in list(self._fetches.values()):
            if fetch.state is _State.ABANDONED:
                continue
            if now >= self._silent_at(fetch):
                self._fail(
                    fetch,
                    PeerLost(
                        f"{fetch.peer.host}:{fetch.peer.port} computes the prompt but has not renewed its lease for"
                        f" {self.limits.lease_s:g} s; it hangs, or the network between us does"
                    ),
                )
                continue
            if now < fetch.deadline:
                continue
            doing = {_State.WAITING: "no renewed lease", _State.READING: "bytes missing"}.get(
                fetch.state, "unconfirmed"
            )
            if fetch.state is not _State.CONFIRMING:
                self._end_lease(fetch)
            limit_s = fetch.deadline - fetch.exposed_at
            self._fail(
                fetch,
                TransferTimeout(
                    f"fetch of {len(fetch.local_blocks)} blocks from {fetch.peer.host}:{fetch.peer.port} took longer"
                    f" than {limit_s:.2f} s ({doing}); transfer_deadline_s and transfer_floor_bytes_s set the limit"
                ),
            )

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        running = [f for f in self._fetches.values() if f.state is not _State.ABANDONED]
        due = [min(f.deadline, self._silent_at(f)) for f in running]
        return min((d for d in due if d != float("inf")), default=None)

    def growing(self, peer: PeerKey) -> list[LeaseId]:
        """Leases of which we want to hear how far they are."""
        return [
            f.lease for f in self._of(peer) if not f.complete and f.lost is None and f.state is not _State.ABANDONED
        ]

    def leases(self, peer: PeerKey) -> list[LeaseId]:
        """Leases to renew at this peer."""
        done = (_State.CONFIRMING, _State.ABANDONED)
        return [f.lease for f in self._of(peer) if f.lost is None and f.state not in done]

    def reading(self, peer: PeerKey) -> bool:
        """Whether bytes of this peer may still land here."""
        return any(f.read_id is not None for f in self._of(peer))

    def check(self) -> None:
        """Assert the invariants: a READ is in flight in the two states that have one, and abandoned means just that."""
        for fetch in self._fetches.values():
            assert (fetch.read_id is not None) == (fetch.state in (_State.READING, _State.ABANDONED)), fetch
            asked = fetch.state is not _State.WATCHED
            assert (fetch.deadline < float("inf")) == (asked and fetch.complete) or fetch.state is _State.ABANDONED, (
                fetch
            )
            assert fetch.proven <= fetch.landed <= fetch.taken <= len(fetch.local_blocks), fetch
            assert fetch.state is not _State.CONFIRMING or (
                fetch.complete and fetch.taken == len(fetch.local_blocks)
            ), fetch
            assert fetch.lost is None or fetch.state is _State.WATCHED, fetch
        reads = [f.read_id for f in self._fetches.values() if f.read_id is not None]
        assert len(reads) == len(set(reads))

    def _of(self, peer: PeerKey) -> list[_Fetch]:
        return [f for f in self._fetches.values() if f.peer == peer]

    def _reading(self, read_id: int) -> _Fetch | None:
        return next((f for f in self._fetches.values() if f.read_id == read_id), None)

    def _silent_at(self, fetch: _Fetch) -> float:
        """When a source that computes for us has said nothing for a lease."""
        if fetch.complete or fetch.state is _State.WATCHED:
            return float("inf")
        return max(fetch.held_until + MARGIN * self.limits.lease_s, fetch.asked_at + self.limits.lease_s)

    def _hurry(self, fetch: _Fetch, now: float) -> None:
        """The KV is complete and asked for: from here on time counts."""
        num_bytes = (len(fetch.local_blocks) - fetch.taken) * self.limits.block_bytes
        fetch.exposed_at = now
        fetch.deadline = now + self.limits.deadline_s + num_bytes / self.limits.floor_bytes_s

    def _start(self, fetch: _Fetch, now: float) -> None:
        """WAITING -> READING what was announced, if the entry fence is open; or, with all in, -> CONFIRMING."""
        if fetch.state is not _State.WAITING:
            return
        announced = fetch.announced
        if fetch.taken < announced:
            if fetch.peer not in self._ready or now >= fetch.held_until:
                return
            self._reads += 1
            fetch.read_id, fetch.state = self._reads, _State.READING
            part = slice(fetch.taken, announced)
            fetch.taken, fetch.posted_at = announced, now
            self.commands.append(Read(self._reads, fetch.peer, fetch.remote_blocks[part], fetch.local_blocks[part]))
        elif fetch.complete:
            self._reads += 1
            fetch.state, fetch.token = _State.CONFIRMING, self._reads
            self._end_lease(fetch)

    def _end_lease(self, fetch: _Fetch) -> None:
        if fetch.lost is None:
            self.commands.append(End(fetch.peer, fetch.lease, fetch.token))

    def _lease_lost(self, fetch: _Fetch) -> LeaseLost:
        return LeaseLost(
            f"{fetch.peer.host}:{fetch.peer.port} no longer holds the blocks of request {fetch.lease.request_id!r}:"
            f" released there, or not renewed for {self.limits.lease_s:g} s"
        )

    def _lose(self, fetch: _Fetch, error: KvrelayError) -> None:
        """The KV cannot be had any more, whatever the fetch was doing."""
        if fetch.state is _State.WATCHED:
            fetch.lost = fetch.lost or error
        elif fetch.state is not _State.ABANDONED:
            self._fail(fetch, error)

    def _finish(self, fetch: _Fetch, now: float) -> None:
        num_bytes, seconds = len(fetch.local_blocks) * self.limits.block_bytes, now - fetch.asked_at
        exposed_s = now - fetch.exposed_at
        self.fetched += 1
        self.fetched_bytes += num_bytes
        self.fetch_s += exposed_s
        self.events.append(
            Fetched(fetch.request_id, num_bytes, seconds, fetch.completion, exposed_s, fetch.read_s, fetch.told_at)
        )
        del self._fetches[fetch.request_id]

    def _fail(self, fetch: _Fetch, error: KvrelayError) -> None:
        self.failures[type(error).__name__] += 1
        self.events.append(FetchFailed(fetch.request_id, sentence(error), fetch.proven))
        self._abandon(fetch)

    def _abandon(self, fetch: _Fetch) -> None:
        if fetch.read_id is None:
            self._settle(fetch)
        else:
            fetch.state, fetch.lost = _State.ABANDONED, None

    def _settle(self, fetch: _Fetch) -> None:
        self.events.append(Settled(fetch.request_id))
        del self._fetches[fetch.request_id]
