"""What rank 0 and the other ranks of an engine say to each other about data planes: typed msgpack,
size-limited.

Owns the words, and the `Meeting` that leads a rank to the socket; not the talk. A plane is named by
its kind.
"""

from __future__ import annotations

import msgspec

from kvrelay.kv_transfer.commands import PeerKey, Read
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.planes import Source
from kvrelay.wire import errors
from kvrelay.wire.errors import KvrelayError, TransferError

__all__ = [
    "MAX_RANK_MESSAGE_BYTES",
    "AddPeer",
    "Broke",
    "Close",
    "DropPeer",
    "FromRank",
    "Joined",
    "Meeting",
    "Open",
    "Opened",
    "PeerGone",
    "PlaneTerms",
    "Post",
    "Prepared",
    "ReadEnded",
    "ReadFailed",
    "Serve",
    "Stop",
    "Sum",
    "Summed",
    "ToRank",
    "error_of",
]

# A Post names up to 100,000 blocks on either side.
MAX_RANK_MESSAGE_BYTES = 1 << 20


class PlaneTerms(msgspec.Struct, frozen=True):
    """Which planes are wanted, the best first, and what they must know of the configuration."""

    kinds: tuple[str, ...]
    host: str
    """Address at which peers reach this process."""
    meet_s: float
    patience_s: float
    summed_heads: int = 0
    """KV heads of each rank, if checksums of blocks may be asked for; else 0."""


class Meeting(msgspec.Struct, frozen=True):
    """Where rank 0 awaits the others, and the CURVE key without which nobody gets a word in."""

    host: str
    port: int
    key: bytes
    engine_id: str
    terms: PlaneTerms


class Open(msgspec.Struct, tag="open", frozen=True):
    """Open this plane. Opened follows."""

    kind: str


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Close this plane for good: another rank cannot have it."""

    kind: str


class AddPeer(msgspec.Struct, tag="add", frozen=True):
    """Get ready to read from a rank of a source. Joined follows."""

    kind: str
    peer: PeerKey
    source: Source


class Post(msgspec.Struct, tag="post", frozen=True):
    """Read. ReadEnded or ReadFailed follows."""

    kind: str
    read: Read


class PeerGone(msgspec.Struct, tag="gone", frozen=True):
    """The source does not answer any more."""

    kind: str
    peer: PeerKey


class DropPeer(msgspec.Struct, tag="drop", frozen=True):
    """Nothing is read from this peer any more."""

    kind: str
    peer: PeerKey


class Serve(msgspec.Struct, tag="serve", frozen=True):
    """Whether peers may be reading from the engine."""

    on: bool


class Sum(msgspec.Struct, tag="sum", frozen=True):
    """Compute the checksums of these blocks. Summed follows."""

    number: int
    blocks: list[int]


class Close(msgspec.Struct, tag="close", frozen=True):
    """The engine ends."""


class Prepared(msgspec.Struct, tag="prepared", frozen=True):
    """Rank -> 0, first: its pool, and the planes that it cannot have, each with the reason."""

    rank: int
    region: PoolRegion
    missing: dict[str, str]


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """The answer to Open: what peers need to use the plane, or why it cannot be had."""

    kind: str
    card: bytes | None
    why: str = ""


class Joined(msgspec.Struct, tag="joined", frozen=True):
    """Reads from this peer may be posted; or never will be, by an error of this kind with this
    message.
    """

    kind: str
    peer: PeerKey
    error: tuple[str, str] | None


class ReadEnded(msgspec.Struct, tag="ended", frozen=True):
    """All bytes of this rank's part are in."""

    kind: str
    peer: PeerKey
    read_id: int


class ReadFailed(msgspec.Struct, tag="failed", frozen=True):
    """This rank's part broke."""

    kind: str
    peer: PeerKey
    read_id: int
    error: tuple[str, str]
    in_flight: bool


class Broke(msgspec.Struct, tag="broke", frozen=True):
    """A plane's thread has ended by an error of ours."""

    reason: str


class Summed(msgspec.Struct, tag="summed", frozen=True):
    """The answer to Sum, in the order of its blocks."""

    number: int
    checksums: list[bytes]


ToRank = Open | Stop | AddPeer | Post | PeerGone | DropPeer | Serve | Sum | Close
FromRank = Prepared | Opened | Joined | ReadEnded | ReadFailed | Summed | Broke


def error_of(error: tuple[str, str]) -> KvrelayError:
    """The error of that name in wire/errors.py, with that message."""
    name, message = error
    kind = getattr(errors, name, None)
    return (
        kind(message)
        if isinstance(kind, type) and issubclass(kind, TransferError)
        else TransferError(message)
    )
