"""KV events: what a node tells of its prefix cache, and the sequence that it tells it in.

The wire is vLLM's: a PUB socket sends (topic, sequence number as 8 bytes big-endian, batch as
msgpack); a REQ or DEALER that sends a ROUTER socket a number gets (number, batch) for each batch
from that one on, then (END, nothing).

A batch is the array (time, events, rank 0 of one engine). Events are arrays with their kind first
and vLLM's fields in vLLM's order, as its releases before June 2026 write them, or maps with the
same names, as later ones do; no listener that goes by types reads both. What has no value is null.
Two things differ: token ids are told only if asked for, and who comes too late for the buffer is
answered with one batch that begins with AllBlocksCleared and stores all that is held. To any
listener that is the state after this number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "END",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "KvEventsReport",
    "is_snapshot",
    "key_of",
    "keys_of",
    "number_of",
    "pack_batch",
    "packed_number",
    "read_batch",
]

END = b"\xff" * 8
"""In place of a sequence number: the replay has ended."""
_NUMBER_BYTES = 8
_KEY_BYTES = 8

Hash = bytes | int
"""Ours are 16 bytes. vLLM's are 32 bytes, or integers."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A chain of blocks is held now; each is the parent of the next one."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int] = []
    """Of all blocks, one after the other; empty if the node keeps them to itself."""
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    """For each block what else its hash depends on: the adapter's name, and for a prompt's first
    one the salt.
    """
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These blocks are held no more."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No block is held."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredMap(BlockStored, frozen=True, array_like=False, tag="BlockStored"):
    pass


class _RemovedMap(BlockRemoved, frozen=True, array_like=False, tag="BlockRemoved"):
    pass


class _ClearedMap(AllBlocksCleared, frozen=True, array_like=False, tag="AllBlocksCleared"):
    pass


_MAPS = {BlockStored: _StoredMap, BlockRemoved: _RemovedMap, AllBlocksCleared: _ClearedMap}


class EventBatch(msgspec.Struct, frozen=True):
    """What has changed since the batch before, in order. `ts`: Unix seconds."""

    ts: float
    events: list[Event]


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _BatchMap(_Batch, frozen=True, array_like=False):
    pass


class KvEventsReport(msgspec.Struct, frozen=True):
    """In a node's health report: where its events are told, on the host that the report came from."""

    port: int
    replay_port: int
    next_number: int
    """Of the next batch: who has not heard of all before has lost some."""


_ENGINE = 0
"""The data-parallel rank of the engine that tells: a node has one."""

_encoder = msgspec.msgpack.Encoder()
_batch = msgspec.msgpack.Decoder(_Batch)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_event = msgspec.msgpack.Decoder(Event)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)


def pack_batch(batch: EventBatch, *, maps: bool = False) -> bytes:
    """A batch as it goes over the wire, its events as arrays or as maps."""
    events = (
        [_MAPS[type(event)](*msgspec.structs.astuple(event)) for event in batch.events]
        if maps
        else batch.events
    )
    return _encoder.encode((batch.ts, events, _ENGINE))


def read_batch(payload: bytes) -> EventBatch:
    """Read a batch in any form that is or was in use, of our nodes or of vLLM's. Raises NodeFailed."""
    try:
        raw = _batch.decode(payload) if _is_array(payload) else _batch_map.decode(payload)
        events: list[Event] = []
        for piece in raw.events:
            event = bytes(piece)
            events.append(_event.decode(event) if _is_array(event) else _event_map.decode(event))
    except MALFORMED as why:
        raise NodeFailed(f"a node sent malformed KV events: {why}") from why
    return EventBatch(raw.ts, events)


def is_snapshot(batch: EventBatch) -> bool:
    """Whether it says all that is held, whatever was told before."""
    return bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)


def packed_number(number: int) -> bytes:
    """A sequence number as it goes over the wire."""
    return number.to_bytes(_NUMBER_BYTES, "big")


def number_of(packed: bytes) -> int:
    """Its inverse. Raises NodeFailed."""
    if len(packed) != _NUMBER_BYTES:
        raise NodeFailed(
            f"a sequence number of KV events has {_NUMBER_BYTES} bytes, got {len(packed)}"
        )
    return int.from_bytes(packed, "big")


def key_of(block_hash: Hash) -> int:
    """What a router remembers of a hash: 64 bits are enough to choose a node by, and half as large."""
    if isinstance(block_hash, int):
        return block_hash & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(block_hash[:_KEY_BYTES], sys.byteorder)


def keys_of(hashes: Sequence[Hash] | Iterable[Hash]) -> list[int]:
    """The same for several."""
    return [key_of(block_hash) for block_hash in hashes]


def _is_array(packed: bytes) -> bool:
    return bool(packed) and (0x90 <= packed[0] <= 0x9F or packed[0] in (0xDC, 0xDD))
