"""Messages of two connectors on the control channel: typed msgpack of a limited size.

The backends' metadata is opaque bytes, handed on only after the fingerprints agreed.
"""

from __future__ import annotations

import msgspec

from kvrelay.kv_transfer.connector import Completion, LeaseId, PoolRegion
from kvrelay.kv_transfer.host_memory import HostFile
from kvrelay.kv_transfer.shares import Heads
from kvrelay.kv_transfer.sockets import Codec
from kvrelay.wire.transfer import Fingerprint

__all__ = [
    "MAX_MESSAGE_BYTES",
    "End",
    "Ended",
    "Follow",
    "ChunkProgress",
    "HandshakeRequest",
    "Message",
    "RankCard",
    "Refused",
    "Renew",
    "Renewed",
    "HandshakeReply",
    "decode",
    "encode",
]

MAX_MESSAGE_BYTES = 1 << 20


class HandshakeRequest(msgspec.Struct, tag="hello", frozen=True):
    """Reader -> source, first, and again with each backend that it needs."""

    engine_id: str
    fingerprint: Fingerprint
    opens: list[str] | None = None
    """Backends that are to be open when the HandshakeReply comes. None is of a release that wants all of
    them.
    """


class RankCard(msgspec.Struct, frozen=True):
    """One rank of a source."""

    heads: Heads
    region: PoolRegion
    planes: dict[str, bytes]
    """Its backends that are open by name, with what a reader needs to use each: opaque here."""


class HandshakeReply(msgspec.Struct, tag="welcome", frozen=True):
    """Source -> reader: the fingerprints agree; here are the pools."""

    engine_id: str
    generation: str
    fingerprint: Fingerprint
    ranks: list[RankCard]
    lease_words: HostFile | None = None
    """Where a reader on the source's host finds its leases (kv_transfer/host_memory.py)."""
    checksums: bool = False
    """Whether it answers a reader that asks for checksums of blocks."""
    on_request: list[str] = []
    """Its backends that a reader can have opened by another HandshakeRequest."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Source -> reader: no KV from here, and why, in one sentence."""

    reason: str


class Renew(msgspec.Struct, tag="renew", frozen=True):
    """Reader -> source, every heartbeat. `sent_at` is the reader's clock, echoed."""

    sent_at: float
    leases: list[LeaseId]


class Renewed(msgspec.Struct, tag="renewed", frozen=True):
    """Source -> reader."""

    sent_at: float
    kept: list[LeaseId]
    lost: list[LeaseId]


class End(msgspec.Struct, tag="end", frozen=True):
    """Reader -> source: through with this lease. Only a token other than 0 is waited for."""

    lease: LeaseId
    token: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """Source -> reader: whether the lease was held until the End came."""

    token: int
    held: bool


class Follow(msgspec.Struct, tag="follow", frozen=True):
    """Reader -> source: tell how far this lease's KV is, now and whenever it has grown.

    With `checksums` it asks for those of these blocks, in a ChunkProgress, and for nothing else.
    """

    lease: LeaseId
    checksums: list[int] = []


class ChunkProgress(msgspec.Struct, tag="grown", frozen=True):
    """Source -> reader: the first `ready` blocks can be read; all of them with a completion."""

    lease: LeaseId
    ready: int
    completion: Completion | None
    checksums: dict[int, bytes] = {}
    """By block, as asked for: 8 bytes for each KV head of each rank (kernels/block_checksums.py)."""


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
)

_codec: Codec[Message] = Codec(Message, MAX_MESSAGE_BYTES)
encode, decode = _codec.encode, _codec.decode
