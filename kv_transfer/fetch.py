"""One fetch: how far it is, and when it is late. Pure: `now` is an argument."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvrelay.kv_transfer.connector import Completion, LeaseId, PeerKey
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import KvrelayError, PeerLost, TransferTimeout

__all__ = ["MARGIN", "NEVER", "Checks", "Fetch", "State"]

# Part of the lease left to clock drift and an acknowledgement's way.
MARGIN = 0.1
NEVER = float("inf")


class State(enum.StrEnum):
    """A fetch's state, by what is missing."""

    WATCHED = "not asked for"
    WAITING = "no renewed lease"  # or the peer, or more of the KV
    READING = "bytes missing"
    CONFIRMING = "unconfirmed"
    CHECKING = "our checksums missing"
    ABANDONED = "unwanted"  # but a READ is in flight


@dataclass(slots=True)
class Checks:
    """A fetch's comparison of checksums. The source's ids name blocks."""

    places: dict[int, int] = field(default_factory=dict)  # of drawn blocks, in the fetch
    theirs: dict[int, bytes] = field(default_factory=dict)
    ours: dict[int, bytes] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        return len(self.theirs) == len(self.places)

    @property
    def wrong(self) -> list[int]:
        """Blocks that are not what the source has, by place."""
        known = (block for block in self.places if block in self.theirs and block in self.ours)
        return [block for block in known if self.theirs[block] != self.ours[block]]

    @property
    def sound(self) -> float:
        """Return how many first blocks a failed fetch may keep; none if any is wrong."""
        known = self.theirs.keys() & self.ours.keys()
        unknown = (place for block, place in self.places.items() if block not in known)
        return 0 if self.wrong else min(unknown, default=float("inf"))


@dataclass(slots=True)
class Fetch:
    request_id: str
    peer: PeerKey
    lease: LeaseId
    config: TransferConfig
    block_bytes: int
    growing: int | None  # blocks of a ticket older than its KV
    complete: bool
    state: State = State.WATCHED
    held_until: float = -NEVER  # entry fence
    lost: KvrelayError | None = None  # why a fetch would fail at once
    ready: int = 0  # blocks of a growing ticket that can be read
    completion: Completion | None = None
    told_at: float | None = None  # when the completion came
    read_id: int | None = None  # the READ in flight
    taken: int = 0  # our blocks whose READ was posted
    landed: int = 0  # taken blocks that are in
    ends: list[tuple[float, int]] = field(default_factory=list)
    """When unverified READs ended, and `landed` then."""
    verified: int = 0  # landed blocks that the source has held since
    token: int = 0  # names the End that is to confirm it
    checks: Checks = field(default_factory=Checks)
    remote_blocks: tuple[int, ...] = ()
    local_blocks: tuple[int, ...] = ()
    asked_at: float = 0.0
    within_s: float = 0.0  # its own limit, if not 0
    exposed_at: float = 0.0  # from here on nobody waits but for us
    deadline: float = NEVER

    @property
    def announced(self) -> int:
        """Number of our blocks that can be read: the last ones of the ticket."""
        if self.complete:
            return len(self.local_blocks)
        return max(0, self.ready - ((self.growing or 0) - len(self.local_blocks)))

    @property
    def released(self) -> bool:
        return self.state in (State.CONFIRMING, State.CHECKING)

    def kept(self, sent_at: float) -> None:
        """Note that the source held the lease when our renewal of `sent_at` came."""
        self.held_until = max(self.held_until, sent_at + self.config.lease_s * (1 - MARGIN))
        while self.ends and self.ends[0][0] <= sent_at:
            self.verified = self.ends.pop(0)[1]

    def hurry(self, now: float) -> None:
        """Start the deadline: the KV is complete and asked for."""
        missing_bytes = (len(self.local_blocks) - self.taken) * self.block_bytes
        missing_s = missing_bytes / self.config.transfer_floor_bytes_s
        limit_s = self.within_s or self.config.transfer_deadline_s + missing_s
        self.exposed_at, self.deadline = now, now + limit_s

    @property
    def due(self) -> float:
        """Return when it is late if nothing happens."""
        return NEVER if self.state is State.ABANDONED else min(self.deadline, self._silent_at)

    def late(self, now: float) -> KvrelayError | None:
        """Return why it fails now by its limits alone, or None."""
        if now < self.due:
            return None
        where = f"{self.peer.host}:{self.peer.port}"
        if now >= self._silent_at:
            return PeerLost(
                f"{where} computes the prompt but has not renewed its lease for "
                f"{self.config.lease_s:g} s; it hangs, or the network between us does"
            )
        doing = str(self.state)
        if self.state is State.WAITING and self.complete and self.landed == len(self.local_blocks):
            doing = "its checksums missing"
        fewer = ", or lower kv_checksums" if "checksums" in doing else ""
        return TransferTimeout(
            f"fetch of {len(self.local_blocks)} blocks from {where} took longer than "
            f"{self.deadline - self.exposed_at:.2f} s ({doing}); transfer_deadline_s and "
            f"transfer_floor_bytes_s set the limit{fewer}"
        )

    @property
    def _silent_at(self) -> float:
        if self.complete or self.state in (State.WATCHED, State.ABANDONED):
            return NEVER
        lease_s = self.config.lease_s
        return max(self.held_until + MARGIN * lease_s, self.asked_at + lease_s)

    def check(self) -> None:
        assert (self.read_id is not None) == (self.state in (State.READING, State.ABANDONED)), self
        timed = self.state is not State.WATCHED and self.complete
        assert (self.deadline < NEVER) == timed or self.state is State.ABANDONED, self
        assert self.verified <= self.landed <= self.taken <= len(self.local_blocks), self
        all_taken = self.complete and self.taken == len(self.local_blocks)
        assert not self.released or (all_taken and self.checks.answered), self
        assert self.lost is None or self.state is State.WATCHED, self
