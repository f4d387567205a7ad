"""The connector interface: all that an engine process asks of whatever moves KV between nodes.

One connector serves both ends. As the *source* it keeps a lease on offered blocks until the reader
releases them, the router does, or the lease runs out. As the *reader* it keeps the source's lease
alive from `watch` on, and fetches. It never touches scheduler or block pool: what happened is told
in `events()`, which the step loop drains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrelay.wire.outputs import TokenLogprobs
from kvrelay.wire.transfer import Ticket

__all__ = [
    "Completion",
    "Connector",
    "Event",
    "FetchFailed",
    "Fetched",
    "PoolRegion",
    "Released",
    "Settled",
    "TransferStats",
    "Way",
]


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """The KV pool of this rank: `num_blocks` blocks, block i at `address + i * block_bytes`,
    contiguous.
    """

    address: int
    num_blocks: int
    block_bytes: int
    device: str
    """`cpu` or `cuda:N`."""


class Completion(msgspec.Struct, frozen=True):
    """What a request whose KV is complete has generated: tokens, and their log-probabilities if it
    wants any.
    """

    generated: list[int]
    logprobs: list[TokenLogprobs] = []


@dataclass(frozen=True, slots=True)
class Released:
    """Source: nobody needs the offered blocks of this request any more. `expired` if only the lease
    ended it.
    """

    request_id: str
    expired: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """Reader: all bytes are in, and the source still held them for us when the last one arrived
    (fenced).
    """

    request_id: str
    num_bytes: int
    seconds: float
    completion: Completion | None = None
    """Of a growing ticket: how the source's part of the request has ended."""
    exposed_s: float = 0.0
    """Seconds from the moment at which the KV was complete, or the fetch was asked for if that was
    later.
    """
    read_s: float = 0.0
    """Seconds in which the data plane was reading."""
    told_at: float | None = field(default=None, compare=False)
    """Of a growing ticket: monotonic second at which the news came that its KV was complete."""


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Reader: no more of the KV will come. Its blocks may still be written to: they stay untouched
    until Settled.

    Not so the first `proven` of them: their bytes are in, and the source held them until after
    that.
    """

    request_id: str
    reason: str
    """The cause, which is the name of an error in wire/errors.py; a colon, and its sentence."""
    proven: int = 0

    @property
    def cause(self) -> str:
        """The name by which failures are counted."""
        return self.reason.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Settled:
    """Reader: no transfer can touch the local blocks of a failed or cancelled fetch any more.
    Follows each once.
    """

    request_id: str


Event = Released | Fetched | FetchFailed | Settled


@dataclass(frozen=True, slots=True)
class Way:
    """How the KV of a peer comes here."""

    plane: str
    """Name of the data plane."""
    missed: Mapping[str, str]
    """Planes that are preferred to it, and why each cannot be had."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since start; gauges now."""

    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    leases_held: int = 0
    fetches: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed fetches by their error's name."""
    retries: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    checked_blocks: int = 0
    """Of fetched blocks, those whose checksum was compared with the source's."""
    wrong_blocks: int = 0
    """Of these, those that were not what the source has."""
    unchecked_blocks: int = 0
    """Those drawn for a check whose source gives no checksums."""
    silent_s: float = 0.0
    """Since the slowest of its threads was seen at work; one that waits for work is."""


class Connector(Protocol):
    """See the module. All methods may be called from one thread (the step loop) and return at once."""

    @property
    def engine_id(self) -> str:
        """Stable name of this node among its peers."""

    @property
    def generation(self) -> str:
        """Fresh at every process start."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the control channel that peers dial."""

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the data planes that peers can use, the best first; some are opened when one
        asks for them.
        """

    def offer(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        ready: int | None = None,
        adapter: tuple[str, str] = ("", ""),
    ) -> Ticket:
        """Source: lease these blocks to whoever comes with the returned params. One Released
        follows.

        `ready`: the KV still grows, so many of the blocks can be read. None: all of it is there.
        """

    def grow(self, request_id: str, ready: int) -> None:
        """Source: so many blocks of a growing offer can be read. Unknown ids are ignored."""

    def complete(self, request_id: str, completion: Completion) -> Ticket | None:
        """Source: all KV of a growing offer is there. The params for a reader that comes now; None
        for unknown ids.
        """

    def prolong(self, request_id: str) -> None:
        """Source: the lease begins anew, because somebody waits who has no connector. Unknown ids
        are ignored.
        """

    def release(self, request_id: str) -> None:
        """Source: end the lease now. Unknown ids are ignored."""

    def watch(self, request_id: str, ticket: Ticket) -> None:
        """Reader: this request will want that KV; keep its lease alive from now on (also while it
        queues).
        """

    def fetch(
        self, request_id: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> None:
        """Reader: read remote block i into local block i; the request is watched. One Fetched or
        FetchFailed follows.

        Empty lists fetch nothing and release the source's lease (the reader had all of it cached).
        """

    def cancel(self, request_id: str) -> None:
        """Reader: the request is gone. Releases the source's lease. Exactly one Settled follows if
        a fetch was running (and no Fetched after it); nothing follows a request that was only
        watched.
        """

    def way(self, ticket: Ticket) -> Way | None:
        """Reader: how the KV of this ticket's source is read; None while that is not known, or no
        more.
        """

    def events(self) -> list[Event]:
        """What happened since the last call, in order."""

    def stats(self) -> TransferStats:
        """Counters and gauges."""

    def close(self) -> None:
        """End all threads and sockets within a second."""
