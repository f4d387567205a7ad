"""Fetches of a reader: what each watched request waits for, and when its KV is admitted. Pure.

A READ *starts* only while the lease is surely held: the last acknowledged renewal was sent less
than a lease (minus a margin) ago. KV is *admitted* only when the source confirms, after the last
byte, that it held the lease until then. Blocks are *verified*, and kept if the fetch fails, by an
acknowledged renewal that was sent after their READ. While a ticket grows, each READ takes what was
announced since the last.

A share of the blocks is compared with the source's checksums. Only a difference under a held lease
is KvCorrupted, and then nothing is kept.

A failed or cancelled fetch is Settled only when nothing of its READ can land any more: NIXL hands
back a cancelled handle and goes on writing (seen: 969 of 1024 MiB).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvrelay.kv_transfer.checksums import MOST_BLOCKS
from kvrelay.kv_transfer.connector import (
    BlockIds,
    Completion,
    Fetched,
    FetchFailed,
    LeaseId,
    PeerKey,
    Read,
    Settled,
)
from kvrelay.kv_transfer.fetch import NEVER, Checks, Fetch, State
from kvrelay.kv_transfer.messages import Doubt, End, Follow, Message, Renew
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.engine_messages import TransferStats
from kvrelay.wire.errors import KvCorrupted, KvrelayError, LeaseLost, TransferTimeout

__all__ = ["Command", "FetchTable", "Sum"]


class Sum(NamedTuple):
    """A command: compute checksums of local blocks, for `summed`."""

    checks: Checks
    blocks: list[int]
    local_blocks: list[int]


Command = Read | Sum | tuple[PeerKey, Message]


class FetchTable:
    """A reader's fetches. Each ends once: Fetched, or (FetchFailed or cancel and) Settled."""

    def __init__(self, config: TransferConfig, block_bytes: int, *, keeps: bool = False) -> None:
        """`block_bytes`: of all ranks. `keeps`: checksums are kept for whoever reads the KV here."""
        self._config, self._block_bytes, self._keeps = config, block_bytes, keeps
        self.events: list[Fetched | FetchFailed | Settled] = []
        self.commands: list[Command] = []
        self.stats = TransferStats()
        self._fetches: dict[str, Fetch] = {}
        self._ready: dict[PeerKey, bool] = {}  # whether it gives checksums
        self._keepers: set[PeerKey] = set()  # peers whose checksums are as old as their KV
        self._reads = 0

    def watch(
        self, request_id: str, peer: PeerKey, lease: LeaseId, growing: int | None = None
    ) -> None:
        """Begin to renew a lease. Raises ValueError if the request is watched or unsettled.

        `growing`: number of blocks, if the KV is not complete.
        """
        if request_id in self._fetches:
            raise ValueError(
                f"request {request_id!r} is already {self._fetches[request_id].state.name.lower()}"
            )
        self._fetches[request_id] = Fetch(
            request_id,
            peer,
            lease,
            self._config,
            self._block_bytes,
            growing,
            complete=growing is None,
        )

    def doom(self, request_id: str, error: KvrelayError) -> None:
        self._lose(self._fetches[request_id], error)

    def fetch(
        self,
        request_id: str,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        now: float,
        within_s: float = 0.0,
    ) -> None:
        """Fetch a watched request's KV; no blocks: all was cached. Raises ValueError for others."""
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.state is not State.WATCHED:
            raise ValueError(
                f"request {request_id!r} is {fetch.state.name.lower() if fetch else 'not watched'}"
            )
        fetch.remote_blocks, fetch.local_blocks = tuple(remote_blocks), tuple(local_blocks)
        fetch.asked_at, fetch.within_s = now, within_s
        fetch.state = State.WAITING
        if fetch.complete:
            fetch.hurry(now)
        if not local_blocks and fetch.growing is None:
            self._end_lease(fetch)
            self._finish(fetch, now)
        elif fetch.lost is not None:
            self._fail(fetch, fetch.lost)
        else:
            self._start(fetch, now)

    def cancel(self, request_id: str) -> None:
        """End a request: no Fetched or FetchFailed follows."""
        for event in self.events:
            if isinstance(event, Fetched | FetchFailed) and event.request_id == request_id:
                self.events.remove(event)
                if isinstance(event, Fetched):
                    # To the caller the fetch still ran, so it waits for Settled.
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

    def peer_ready(
        self, peer: PeerKey, now: float, *, vouches: bool = False, keeps_checksums: bool = False
    ) -> None:
        """Read from this peer; one that `keeps_checksums` has all its blocks checked."""
        self._ready[peer] = vouches
        if keeps_checksums:
            self._keepers.add(peer)
        for fetch in self._of(peer):
            self._start(fetch, now)

    def peer_not_ready(self, peer: PeerKey) -> None:
        """Post no READ from this peer until `peer_ready`."""
        self._ready.pop(peer, None)
        self._keepers.discard(peer)

    def peer_lost(self, peer: PeerKey, error: KvrelayError) -> None:
        """Fail what needs this peer's answers; reads in flight end by themselves."""
        self.peer_not_ready(peer)
        for fetch in self._of(peer):
            if fetch.state is not State.CHECKING:  # else it has held all that we need
                self._lose(fetch, error)

    def grown(
        self, peer: PeerKey, lease: LeaseId, ready: int, completion: Completion | None, now: float
    ) -> None:
        """Note that the first `ready` blocks can be read; with a completion all."""
        for fetch in self._of(peer):
            if fetch.lease != lease or fetch.complete:
                continue
            fetch.ready = min(fetch.growing or 0, max(fetch.ready, ready))
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
        still, gone = set(kept), set(lost)
        for fetch in self._of(peer):
            if fetch.lease in still:
                fetch.kept(sent_at)
                self._start(fetch, now)
            elif fetch.lease in gone and not fetch.released:
                # Once released, the answer to the End decides.
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
        """Handle the peer's checksums of blocks of this lease, by its ids.

        What was not asked for, or comes again, is ignored.
        """
        for fetch in self._of(peer):
            if fetch.lease == lease:
                for block in checksums.keys() & fetch.checks.places.keys():
                    fetch.checks.theirs.setdefault(block, checksums[block])
                if self._keeps:
                    fetch.checks.ours.update(fetch.checks.theirs)
                self._start(fetch, now)

    def summed(self, command: Sum, checksums: Sequence[bytes], now: float) -> None:
        command.checks.ours.update(zip(command.blocks, checksums, strict=True))
        for fetch in list(self._fetches.values()):
            if fetch.checks is command.checks and fetch.state is State.CHECKING:
                self._admit(fetch, now)

    def read_ended(self, read_id: int, now: float) -> None:
        fetch = self._reading(read_id)
        if fetch is None:
            return
        landed_before, fetch.read_id, fetch.landed = fetch.landed, None, fetch.taken
        if fetch.state is State.ABANDONED:
            self._settle(fetch)
            return
        self._sum(fetch, landed_before)
        fetch.ends.append((now, fetch.landed))
        fetch.state = State.WAITING
        self._start(fetch, now)
        if fetch.state is not State.CONFIRMING:  # else the answer to its End is the proof
            self.commands.append((fetch.peer, Renew(now, [fetch.lease])))  # verifies what is in

    def read_failed(self, read_id: int, error: KvrelayError, *, in_flight: bool) -> None:
        """Handle a broken READ. `in_flight`: bytes may still land; another call follows."""
        fetch = self._reading(read_id)
        if fetch is None:
            return
        if not in_flight:
            fetch.read_id = None
        if fetch.state is State.READING:
            self._end_lease(fetch)
            self._fail(fetch, error)
        elif fetch.read_id is None:
            self._settle(fetch)

    def tick(self, now: float) -> None:
        for fetch in list(self._fetches.values()):
            error = fetch.late(now)
            if error is None:
                continue
            if isinstance(error, TransferTimeout) and not fetch.released:
                self._end_lease(fetch)
            self._fail(fetch, error)

    def next_deadline(self) -> float:
        return min((fetch.due for fetch in self._fetches.values()), default=NEVER)

    def leases(self, peer: PeerKey, *, growing: bool = False) -> list[LeaseId]:
        """Return the leases that are wanted; `growing`: those alone whose KV is not complete."""
        wanted = [f for f in self._of(peer) if f.lost is None and f.state is not State.ABANDONED]
        return [f.lease for f in wanted if not (f.complete if growing else f.released)]

    def reading(self, peer: PeerKey) -> bool:
        return any(f.read_id is not None for f in self._of(peer))

    def check(self) -> None:
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
            fetch.taken = announced
            self.commands.append(
                Read(self._reads, fetch.peer, fetch.remote_blocks[part], fetch.local_blocks[part])
            )
            self._draw(fetch, part)
        elif fetch.complete and fetch.checks.answered:
            self._reads += 1
            fetch.state, fetch.token = State.CONFIRMING, self._reads
            self._end_lease(fetch)

    def _draw(self, fetch: Fetch, part: slice) -> None:
        remote = fetch.remote_blocks[part]
        share = 1.0 if fetch.peer in self._keepers else self._config.kv_checksums
        places = enumerate(remote, part.start)
        drawn = {block: place for place, block in places if random.random() < share}
        if not self._ready[fetch.peer]:
            self.stats.unchecked_blocks += len(drawn)
            return
        fetch.checks.places.update(drawn)
        chosen = list(drawn)
        for first in range(0, len(chosen), MOST_BLOCKS):
            asked = Follow(fetch.lease, chosen[first : first + MOST_BLOCKS])
            self.commands.append((fetch.peer, asked))

    def _sum(self, fetch: Fetch, first: int) -> None:
        if self._keeps:
            return
        checks, local = fetch.checks, fetch.local_blocks
        places = [
            (block, place)
            for block, place in checks.places.items()
            if first <= place < fetch.landed
        ]
        for begin in range(0, len(places), MOST_BLOCKS):
            some = places[begin : begin + MOST_BLOCKS]
            self.commands.append(
                Sum(checks, [block for block, _ in some], [local[place] for _, place in some])
            )

    def _admit(self, fetch: Fetch, now: float) -> None:
        checks, stats = fetch.checks, self.stats
        if len(checks.ours) < len(checks.places):
            fetch.state = State.CHECKING
            return
        wrong = checks.wrong
        stats.checked_blocks += len(checks.places)
        stats.wrong_blocks += len(wrong)
        if not wrong:
            self._finish(fetch, now)
            return
        if fetch.peer in self._keepers:
            self.commands.append((fetch.peer, Doubt(wrong)))
        self._fail(
            fetch,
            KvCorrupted(
                f"{len(wrong)} of {len(checks.places)} blocks that were checked are not what "
                f"{fetch.peer.host}:{fetch.peer.port} has, the first of them its block {wrong[0]},"
                f" which is {fetch.local_blocks[checks.places[wrong[0]]]} here; test the memory, "
                "GPUs and network between the two"
            ),
        )

    def _end_lease(self, fetch: Fetch) -> None:
        if fetch.lost is None:
            self.commands.append((fetch.peer, End(fetch.lease, fetch.token)))

    def _lease_lost(self, fetch: Fetch) -> LeaseLost:
        return LeaseLost(
            f"{fetch.peer.host}:{fetch.peer.port} no longer holds the blocks of request "
            f"{fetch.lease.request_id!r}: released there, or not renewed for "
            f"{self._config.lease_s:g} s"
        )

    def _lose(self, fetch: Fetch, error: KvrelayError) -> None:
        if fetch.state is State.WATCHED:
            fetch.lost = fetch.lost or error
        elif fetch.state is not State.ABANDONED:
            self._fail(fetch, error)

    def _finish(self, fetch: Fetch, now: float) -> None:
        fetched = Fetched(
            fetch.request_id,
            len(fetch.local_blocks) * self._block_bytes,
            fetch.completion,
            exposed_s=now - fetch.exposed_at,
            told_at=fetch.told_at,
            checksums=fetch.checks.ours,
        )
        self.stats.fetches += 1
        self.stats.fetched_bytes += fetched.num_bytes
        self.stats.fetch_s += fetched.exposed_s
        self.events.append(fetched)
        del self._fetches[fetch.request_id]

    def _fail(self, fetch: Fetch, error: KvrelayError) -> None:
        cause, kept = type(error).__name__, int(min(fetch.verified, fetch.checks.sound))
        self.stats.fetches += 1
        self.stats.failures[cause] += 1
        self.events.append(FetchFailed(fetch.request_id, f"{cause}: {error.message}", kept))
        self._abandon(fetch)

    def _abandon(self, fetch: Fetch) -> None:
        if fetch.read_id is None:
            self._settle(fetch)
        else:
            fetch.state, fetch.lost = State.ABANDONED, None

    def _settle(self, fetch: Fetch) -> None:
        self.events.append(Settled(fetch.request_id))
        del self._fetches[fetch.request_id]
