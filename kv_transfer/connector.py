"""Values of a KV connector: its events, their ids and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvrelay.wire.outputs import TokenLogprobs
from kvrelay.wire.transfer import Source, Ticket

__all__ = [
    "BlockIds",
    "CachedAsked",
    "Completion",
    "Doubted",
    "Event",
    "FetchFailed",
    "Fetched",
    "Granted",
    "LeaseId",
    "OnError",
    "PeerKey",
    "PoolRegion",
    "Read",
    "Released",
    "Settled",
    "Tagged",
    "lease_of",
    "peer_of",
]


BlockIds = Sequence[int]
"""Blocks of a pool, in order."""
OnError = Callable[[Exception], None]
"""A call with an error that has ended a thread."""


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """A rank's KV pool: block i lies at `address + i * block_bytes`, contiguous."""

    address: int
    num_blocks: int
    block_bytes: int
    device: str
    """`cpu` or `cuda:N`."""

    @property
    def gpu(self) -> int | None:
        """Index of its GPU; None on a CPU. Raises ValueError for what a peer may not say."""
        return None if self.device == "cpu" else int(self.device.removeprefix("cuda:"))


class Tagged(msgspec.Struct, frozen=True, tag=str.lower):
    """A message, which the name of its class in lower case tells from others."""


class Completion(msgspec.Struct, frozen=True):
    """A request's output when its KV is complete."""

    generated: list[int]
    logprobs: list[TokenLogprobs] = []


@dataclass(frozen=True, slots=True)
class Released:
    """An event at the source: nobody needs the blocks any more; `expired` if the lease ran out."""

    request_id: str
    expired: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """An event at the reader: all bytes are in, and the source held them until then."""

    request_id: str
    num_bytes: int
    completion: Completion | None = None
    """How the source's part of the request has ended, if the ticket was growing."""
    exposed_s: float = 0.0
    """Seconds since the KV was complete and asked for."""
    told_at: float | None = field(default=None, compare=False)
    """When the news of the completion came, monotonic."""
    checksums: Mapping[int, bytes] = field(default_factory=dict, compare=False)
    """Checksums of the blocks that were checked, by the source's ids."""


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """An event at the reader: no more KV will come. Its blocks stay untouched until Settled.

    The first `verified` blocks may be used: the source held them until after they were in.
    """

    request_id: str
    reason: str
    """The name of an error in wire/errors.py, a colon, and its sentence."""
    verified: int = 0

    @property
    def cause(self) -> str:
        return self.reason.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Settled:
    """An event at the reader: nothing can touch a failed fetch's blocks any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CachedAsked:
    """An event at the source: a peer wants a lease on the longest cached prefix of these hashes.

    `answer_cached` answers it. Prefixes of chained hashes need no earlier block.
    """

    request_id: str
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Granted:
    """An event at the reader: the answer to `ask`, a ticket or why there is none."""

    request_id: str
    ticket: Ticket | None
    reason: str = ""
    """The name of an error, or NotHeld, and perhaps a colon and a sentence."""


@dataclass(frozen=True, slots=True)
class Doubted:
    """An event at a source that keeps checksums: blocks that came to a reader otherwise."""

    blocks: tuple[int, ...]
    request_id: str = ""


Event = Released | Fetched | FetchFailed | Settled | CachedAsked | Granted | Doubted


class LeaseId(NamedTuple):
    """A lease of a request; the epoch tells a second offer from the first."""

    request_id: str
    epoch: int


class PeerKey(NamedTuple):
    """A process that we read from; a restart has another generation."""

    host: str
    port: int
    generation: str


def lease_of(ticket: Ticket) -> LeaseId:
    return LeaseId(ticket.remote_request_id, ticket.lease_epoch)


def peer_of(place: Ticket | Source) -> PeerKey:
    if isinstance(place, Source):
        return PeerKey(place.host, place.port, place.generation)
    return PeerKey(place.remote_host, place.remote_port, place.generation)


class Read(Tagged, frozen=True):
    """A command: read remote block i into local block i. ReadEnded or ReadFailed follows."""

    read_id: int
    peer: PeerKey
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
