"""What the two ends of a pair say to each other beside the bytes: typed msgpack, one message per
frame, size-limited.

Owns the words of the NCCL plane's own control socket, and the address that travels as its metadata;
not the talk.
"""

from __future__ import annotations

import msgspec

from kvrelay.kv_transfer.codec import Codec

__all__ = [
    "MAX_PAIR_MESSAGE_BYTES",
    "Address",
    "Ask",
    "Leave",
    "Meet",
    "PairMessage",
    "Part",
    "decode",
    "encode",
]

# An Ask names up to 200,000 blocks.
MAX_PAIR_MESSAGE_BYTES = 1 << 20


class Address(msgspec.Struct, frozen=True):
    """The plane's metadata: where its control socket is, and the CURVE key without which nobody
    gets a word in.
    """

    host: str
    port: int
    key: bytes


class Meet(msgspec.Struct, tag="meet", frozen=True):
    """Reader -> source, first: make the communicator of a new pair with me."""

    pair: bytes
    slice_bytes: int
    """Transfers are cut into slices of at most this size, by both sides alike."""
    facts: bytes
    """The unique id of an NCCL communicator, by which the source finds the reader."""


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Reader -> source: send this part of these blocks. Transfers of a pair come in the order they
    were asked for.
    """

    pair: bytes
    blocks: list[int]
    start: int
    num_bytes: int


class Part(msgspec.Struct, tag="part", frozen=True):
    """Either way: this pair is over, and why. What was asked for and not sent will not be."""

    pair: bytes
    reason: str
    idle: bool = False
    """All that was asked for has been sent. What has been asked for since then, this end has not
    heard.
    """


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """Source -> reader: memory is short; part, unless you have asked for something."""

    pair: bytes


PairMessage = Meet | Ask | Part | Leave

_codec: Codec[PairMessage] = Codec(PairMessage, MAX_PAIR_MESSAGE_BYTES)
encode, decode = _codec.encode, _codec.decode
