"""Messages of two connectors on the control channel: typed msgpack of a limited size.

Backends' metadata is opaque bytes, used only after the fingerprints agreed.
"""

from __future__ import annotations

import msgspec

from kvrelay.kv_transfer.connector import Completion, LeaseId, PoolRegion, Tagged
from kvrelay.kv_transfer.host_memory import HostFile
from kvrelay.kv_transfer.shares import Heads
from kvrelay.kv_transfer.sockets import Codec
from kvrelay.wire.transfer import Fingerprint, Ticket

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Doubt",
    "End",
    "Ended",
    "Follow",
    "ChunkProgress",
    "HandshakeRequest",
    "LeaseCached",
    "Leased",
    "Message",
    "RankCard",
    "Refused",
    "Renew",
    "Renewed",
    "HandshakeReply",
    "codec",
    "decode",
    "encode",
]

MAX_MESSAGE_BYTES = 1 << 20


class HandshakeRequest(Tagged, tag="hello", frozen=True):
    """A reader's first message, repeated with each backend that it needs."""

    engine_id: str
    fingerprint: Fingerprint
    opens: list[str] = msgspec.field(default_factory=list)
    """Backends to open, told by another reply."""


class RankCard(msgspec.Struct, frozen=True):
    heads: Heads
    region: PoolRegion
    planes: dict[str, bytes]
    """Open backends, with what a reader needs for each."""


class HandshakeReply(Tagged, tag="welcome", frozen=True):
    """A source's answer to a handshake: fingerprints agree; here are the pools."""

    engine_id: str
    generation: str
    fingerprint: Fingerprint
    ranks: list[RankCard]
    lease_words: HostFile | None = None
    """Where a reader on this host finds leases."""
    checksums: bool = False
    on_request: list[str] = msgspec.field(default_factory=list)
    """Backends that another HandshakeRequest opens."""
    keeps_checksums: bool = False
    """Checksums are as old as the KV, so a reader must check all blocks."""


class Refused(Tagged, frozen=True):
    """A source's refusal, with its reason in one sentence."""

    reason: str


class Renew(Tagged, frozen=True):
    """A reader's heartbeat. `sent_at` is the reader's clock, echoed."""

    sent_at: float
    leases: list[LeaseId]


class Renewed(Tagged, frozen=True):
    """A source's answer to Renew."""

    sent_at: float
    kept: list[LeaseId]
    lost: list[LeaseId]


class End(Tagged, frozen=True):
    """A reader's farewell to a lease; tokens other than 0 are waited for."""

    lease: LeaseId
    token: int


class Ended(Tagged, frozen=True):
    """A source's answer to End: whether the lease was held until then."""

    token: int
    held: bool


class Follow(Tagged, frozen=True):
    """A reader's request to hear how far a lease's KV is, now and as it grows.

    With `checksums` it asks for those of these blocks instead.
    """

    lease: LeaseId
    checksums: list[int] = msgspec.field(default_factory=list)


class ChunkProgress(Tagged, tag="grown", frozen=True):
    """A source's news: the first `ready` blocks can be read; with a completion all."""

    lease: LeaseId
    ready: int
    completion: Completion | None
    checksums: dict[int, bytes] = msgspec.field(default_factory=dict)
    """Checksums by block: 8 bytes for each KV head of each rank."""


class LeaseCached(Tagged, tag="lease", frozen=True):
    """A reader's wish for a lease on the longest cached prefix of `hashes`; since version 2."""

    token: int
    generation: str
    """The source's. Nodes of commit 77b69954 need it."""
    first: int
    """Number of the first block in its chain."""
    hashes: bytes
    """16 bytes for each block; each names all before it, too."""


class Leased(Tagged, frozen=True):
    """A source's answer to LeaseCached: a ticket that begins with block `first`, or none."""

    token: int
    ticket: Ticket | None
    refused: str = ""
    """Why it was not looked up."""


class Doubt(Tagged, frozen=True):
    """A reader's news for a source that keeps checksums: blocks that are not what they should be."""

    blocks: list[int]


Message = (
    HandshakeRequest
    | HandshakeReply
    | Refused
    | Renew
    | Renewed
    | End
    | Ended
    | Follow
    | ChunkProgress
    | LeaseCached
    | Leased
    | Doubt
)

codec: Codec[Message] = Codec(Message, MAX_MESSAGE_BYTES)
encode, decode = codec.encode, codec.decode
