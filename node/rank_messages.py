"""Messages of rank 0 to the other ranks that are not about a step: msgpack, in the steps' order."""

from __future__ import annotations

import msgspec

from kvrelay.kv_transfer.ranks import LinkAddress
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = ["FillBlocks", "Meet", "ProfileSteps", "RankMessage", "VerifyBlocks", "decode", "encode"]


class Meet(msgspec.Struct, tag="meet", frozen=True):
    """A request to open backends over the rank's pool and connect to rank 0."""

    meeting: LinkAddress


class FillBlocks(msgspec.Struct, tag="fill", frozen=True):
    """A request to write the rank's share of a probe's pattern into these blocks."""

    seed: int
    blocks: list[int]
    num_kv_heads: int


class VerifyBlocks(msgspec.Struct, tag="verify", frozen=True):
    """A question to all ranks: do these blocks hold their shares of the pattern?"""

    seed: int
    blocks: list[int]
    num_kv_heads: int


class ProfileSteps(msgspec.Struct, tag="profile", frozen=True):
    """A request to begin profiling steps, or to end it and write the trace."""

    config: ProfilerConfig
    begin: bool


RankMessage = Meet | FillBlocks | VerifyBlocks | ProfileSteps

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def encode(message: RankMessage) -> bytes:
    return _encoder.encode(message)


def decode(message: bytes) -> RankMessage:
    return _decoder.decode(message)
