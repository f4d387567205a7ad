"""KV events: what a node tells of its prefix cache, and the sequence that it tells it in.

The wire is vLLM's, so that its listeners understand our nodes and our router its nodes: a PUB socket sends
(topic, sequence number as 8 bytes big-endian, batch as msgpack); to a ROUTER socket a listener says from which number
on it wants batches again, and gets (number, batch) for each, then (END, nothing). Field names are vLLM's; a batch of
ours also has a `generation`. Token ids are never told: `token_ids` is empty, and a salted root keeps hashes apart.

A listener that comes too late for the buffer is answered with one batch that begins with AllBlocksCleared and stores
all that is held: to any listener that is the state after this number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from wire.errors import NodeFailed
from wire.frames import MALFORMED

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


class BlockStored(msgspec.Struct, frozen=True, tag=True, kw_only=False):
    """A chain of blocks is held now; each is the parent of the next one."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """These blocks are held no more."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block is held."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


# Older releases of vLLM, and those who speak as they did, write events, or events and batches, as arrays.
class _StoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class EventBatch(msgspec.Struct, frozen=True):
    """What has changed since the batch before, in order. `ts`: Unix seconds."""

    ts: float
    events: list[Event]
    generation: str = ""
    """Of the process that tells it; empty from nodes that are not ours."""


class _RawBatch(msgspec.Struct, frozen=True):
    ts: float
    events: list[msgspec.Raw]
    generation: str = ""


class _RawBatchArray(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class KvEventsReport(msgspec.Struct, frozen=True):
    """In a node's health report: where its events are told, on the host that the report came from."""

    port: int
    replay_port: int
    next_number: int
    """Of the next batch: who has not heard of all before has lost some."""


_encoder = msgspec.msgpack.Encoder()
_batch = msgspec.msgpack.Decoder(_RawBatch)
_batch_array = msgspec.msgpack.Decoder(_RawBatchArray)
_event = msgspec.msgpack.Decoder(Event)
_event_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def pack_batch(batch: EventBatch) -> bytes:
    """A batch as it goes over the wire."""
    return _encoder.encode(batch)


def read_batch(payload: bytes) -> EventBatch:
    """Its inverse, in any of the forms that are in use. Raises NodeFailed."""
    try:
        raw = _batch_array.decode(payload) if _is_array(payload) else _batch.decode(payload)
        events: list[Event] = []
        for piece in raw.events:
            event = bytes(piece)
            events.append(_event_array.decode(event) if _is_array(event) else _event.decode(event))
    except MALFORMED as why:
        raise NodeFailed(f"a node sent malformed KV events: {why}") from why
    return EventBatch(raw.ts, events, raw.generation if isinstance(raw, _RawBatch) else "")


def is_snapshot(batch: EventBatch) -> bool:
    """Whether it says all that is held, whatever was told before."""
    return bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)


def packed_number(number: int) -> bytes:
    """A sequence number as it goes over the wire."""
    return number.to_bytes(_NUMBER_BYTES, "big")


def number_of(packed: bytes) -> int:
    """Its inverse. Raises NodeFailed."""
    if len(packed) != _NUMBER_BYTES:
        raise NodeFailed(f"a sequence number of KV events has {_NUMBER_BYTES} bytes, got {len(packed)}")
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
