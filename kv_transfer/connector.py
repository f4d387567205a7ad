"""Values of a KV connector: regions, events and commands. They name peers, leases and blocks.

The engine process asks a `TransferEngine` (kv_transfer/transfer_engine.py); what happened is told
in events, which the step loop drains. Commands are what the pure tables want done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvrelay.wire.outputs import TokenLogprobs

__all__ = [
    "LeaseId",
    "Ask",
    "Command",
    "Completion",
    "End",
    "Event",
    "FetchFailed",
    "Fetched",
    "PeerCommand",
    "PeerKey",
    "PoolRegion",
    "Verify",
    "Read",
    "Released",
    "Settled",
    "Sum",
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

    Not so the first `verified` of them: their bytes are in, and the source held them until after
    that.
    """

    request_id: str
    reason: str
    """The cause, which is the name of an error in wire/errors.py; a colon, and its sentence."""
    verified: int = 0

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
    """Backends that are preferred to it, and why each cannot be had."""


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


class LeaseId(NamedTuple):
    """One lease of one request. The epoch tells a second offer of the same request from the first."""

    request_id: str
    epoch: int


class PeerKey(NamedTuple):
    """One process that we read from. A restarted one has a new generation, so it is another peer."""

    host: str
    port: int
    generation: str


class Read(msgspec.Struct, tag="read", frozen=True):
    """Command: read remote block i into local block i. ReadEnded or ReadFailed follows."""

    read_id: int
    peer: PeerKey
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Command: tell the peer that we are through with this lease; its answer goes to `confirmed`
    with this token.
    """

    peer: PeerKey
    lease: LeaseId
    token: int
    """A number of the fetch that waits for the answer; 0 if nobody does."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Command: renew this lease now, not with the next heartbeat; its answer proves what has been
    read.
    """

    peer: PeerKey
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Ask:
    """Command: have the peer send the checksums of these blocks of a lease, by its own ids; they go
    to `vouched`.
    """

    peer: PeerKey
    lease: LeaseId
    remote_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Command: compute the checksums of these blocks of ours; they go to `summed` with this number."""

    number: int
    local_blocks: tuple[int, ...]


PeerCommand = Read | End | Verify | Ask
Command = PeerCommand | Sum
