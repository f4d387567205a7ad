"""Messages of rank 0 to the other ranks that are not about a step: msgpack, in the steps' order."""

from __future__ import annotations

import msgspec

from kvrelay.kv_transfer.ranks import LinkAddress
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = ["FillBlocks", "Meet", "ProfileSteps", "RankMessage", "VerifyBlocks", "decode", "encode"]


class Meet(msgspec.Struct, tag="meet", frozen=True):
    """Open data planes over your pool, and connect to rank 0 there."""

    meeting: LinkAddress


class FillBlocks(msgspec.Struct, tag="fill", frozen=True):
    """Write your share of a probe's pattern into these blocks, and meet the other ranks."""

    seed: int
    blocks: list[int]
    num_kv_heads: int


class VerifyBlocks(msgspec.Struct, tag="verify", frozen=True):
    """Reduce with all ranks whether these blocks hold your share of the pattern."""

    seed: int
    blocks: list[int]
    num_kv_heads: int


class ProfileSteps(msgspec.Struct, tag="profile", frozen=True):
    """Begin to profile your steps, or end that and write the trace."""

    config: ProfilerConfig
    begin: bool


RankMessage = Meet | FillBlocks | VerifyBlocks | ProfileSteps

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def encode(message: RankMessage) -> bytes:
    return _encoder.encode(message)


def decode(message: bytes) -> RankMessage:
    return _decoder.decode(message)
