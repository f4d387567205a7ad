"""What rank 0 tells the other ranks beside the steps, in their order: msgpack, over the engine's
own messages.
"""

from __future__ import annotations

import msgspec

from kvrelay.kv_transfer.ranks import LinkAddress
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = ["Aside", "FillBlocks", "Meet", "ProfileSteps", "VerifyBlocks", "decode", "encode"]


class Meet(msgspec.Struct, tag="meet", frozen=True):
    """Open data planes over your pool, and talk to rank 0's desk there."""

    meeting: LinkAddress


class FillBlocks(msgspec.Struct, tag="fill", frozen=True):
    """Write your share of a probe's pattern into these blocks. All ranks meet when that is done."""

    seed: int
    blocks: list[int]
    num_kv_heads: int


class VerifyBlocks(msgspec.Struct, tag="verify", frozen=True):
    """Say whether these blocks hold your share of the pattern: the least of all ranks' answers
    counts.
    """

    seed: int
    blocks: list[int]
    num_kv_heads: int


class ProfileSteps(msgspec.Struct, tag="profile", frozen=True):
    """Begin to profile your steps, or end that and write what was seen."""

    config: ProfilerConfig
    begin: bool


Aside = Meet | FillBlocks | VerifyBlocks | ProfileSteps

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Aside] = msgspec.msgpack.Decoder(Aside)


def encode(message: Aside) -> bytes:
    """For `kvrelay.paged_engine.engine.aside`."""
    return _encoder.encode(message)


def decode(message: bytes) -> Aside:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(message)
