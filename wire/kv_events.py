"""KV events: names of KV blocks, and what a node tells of its prefix cache.

Names are chained hashes over little-endian 32-bit token ids from a fixed root, equal on all nodes.
Only full blocks are hashed.

The wire is vLLM's: a PUB socket sends (topic, sequence number as 8 bytes big-endian, batch as
msgpack); a ROUTER socket answers a number with (number, batch) for each batch from there on, then
(END, nothing). A batch is the array (time, events, rank 0). Events are arrays of their kind and
vLLM's fields in order, or maps, as vLLM writes them since June 2026. Unlike vLLM, token ids are
told only if asked for, and who is too late for the buffer gets one batch that begins with
AllBlocksCleared and stores all that is held.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvrelay.wire.config_checks import check_fields, require
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "END",
    "ROOT",
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "KvEventsConfig",
    "KvEventsReport",
    "address_of",
    "chain",
    "extend",
    "is_snapshot",
    "key_of",
    "keys_of",
    "number_of",
    "pack_batch",
    "packed_number",
    "read_batch",
    "root_of",
]

BlockHash = bytes
"""16 bytes of BLAKE2b over (parent hash, token ids)."""

_SIZE = 16
ROOT: BlockHash = blake2b(b"kvrelay block chain 1", digest_size=_SIZE).digest()


def root_of(salt: str | None, adapter: str = "") -> BlockHash:
    """Return the parent of a request's first block.

    A salt keeps tenants' caches apart, `adapter` (name and content) KV of other weights.
    """
    root = ROOT if not salt else blake2b(ROOT + salt.encode(), digest_size=_SIZE).digest()
    # Personalized: no salt that a client chooses gives the root of an adapter.
    return (
        root
        if not adapter
        else blake2b(root + adapter.encode(), digest_size=_SIZE, person=b"adapter").digest()
    )


def chain(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return blake2b(parent + packed.tobytes(), digest_size=_SIZE).digest()


def extend(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: BlockHash = ROOT
) -> None:
    """Append the hashes of all further full blocks of `token_ids`."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(chain(parent, token_ids[start : start + block_size]))


END = b"\xff" * 8
"""In place of a sequence number: the replay has ended."""
_NUMBER_BYTES = 8
_KEY_BYTES = 8

Hash = bytes | int
"""Ours have 16 bytes; vLLM's 32, or are integers."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A chain of blocks is held now."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int] = []
    """Token ids of all blocks; empty if the node does not tell them."""
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    """Other parts of each block's hash: adapter and salt."""
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A set of blocks is held no more."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An event: no block is held."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredMap(BlockStored, frozen=True, array_like=False, tag="BlockStored"):
    pass


class _RemovedMap(BlockRemoved, frozen=True, array_like=False, tag="BlockRemoved"):
    pass


class _ClearedMap(AllBlocksCleared, frozen=True, array_like=False, tag="AllBlocksCleared"):
    pass


_MAPS = {BlockStored: _StoredMap, BlockRemoved: _RemovedMap, AllBlocksCleared: _ClearedMap}


class EventBatch(msgspec.Struct, frozen=True):
    """A batch of changes in order; `ts` is a Unix second."""

    ts: float
    events: list[Event]


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _BatchMap(_Batch, frozen=True, array_like=False):
    pass


class KvEventsReport(msgspec.Struct, frozen=True):
    """A part of a node's health report: ports of its KV events."""

    port: int
    replay_port: int
    next_number: int
    """Number of the next batch."""


_ENGINE = 0

_encoder = msgspec.msgpack.Encoder()
_batch = msgspec.msgpack.Decoder(_Batch)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_event = msgspec.msgpack.Decoder(Event)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)


def pack_batch(batch: EventBatch, *, maps: bool = False) -> bytes:
    """Return a batch as bytes, its events as arrays or maps."""
    events = (
        [_MAPS[type(event)](*msgspec.structs.astuple(event)) for event in batch.events]
        if maps
        else batch.events
    )
    return _encoder.encode((batch.ts, events, _ENGINE))


def read_batch(payload: bytes) -> EventBatch:
    """Read a batch in any form of ours or vLLM's. Raises NodeFailed."""
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
    """Return whether a batch says all that is held."""
    return bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)


def packed_number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def number_of(packed: bytes) -> int:
    """Return the number in `packed`. Raises NodeFailed."""
    if len(packed) != _NUMBER_BYTES:
        raise NodeFailed(
            f"a sequence number of KV events has {_NUMBER_BYTES} bytes, got {len(packed)}"
        )
    return int.from_bytes(packed, "big")


def key_of(block_hash: Hash) -> int:
    """Return 64 bits of a hash, enough to choose a node by."""
    if isinstance(block_hash, int):
        return block_hash & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(block_hash[:_KEY_BYTES], sys.byteorder)


def keys_of(hashes: Sequence[Hash] | Iterable[Hash]) -> list[int]:
    return [key_of(block_hash) for block_hash in hashes]


def _is_array(packed: bytes) -> bool:
    return bool(packed) and (0x90 <= packed[0] <= 0x9F or packed[0] in (0xDC, 0xDD))


# The port comes after the last colon, also of an IPv6 number without brackets, as zmq has it.
_ENDPOINT = re.compile(r"tcp://(\*|\[[^\s/\[\]*]+\]|[^\s/\[\]*]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """A choice of where a node tells KV events, and what they say."""

    enable_kv_cache_events: bool = False
    """Tell which blocks the prefix cache holds."""
    publisher: Literal["zmq", "null"] = "zmq"
    """zmq, or null: tell nobody."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Where events are told, tcp://HOST:PORT; * is all addresses, port 0 a free one."""
    replay_endpoint: str = ""
    """Where lost events are told again; empty: nowhere. A router needs it."""
    buffer_steps: Annotated[int, Meta(gt=0)] = 10_000
    """Batches that are kept to be told again, in 4 MiB at most."""
    hwm: Annotated[int, Meta(gt=0)] = 1_024
    """Batches that wait for one listener; further ones are lost to it."""
    max_queue_size: Annotated[int, Meta(gt=0)] = 100_000
    """Batches that wait to be published; a node publishes each at once."""
    topic: str = ""
    """Beginning of each message, for listeners to choose by."""
    token_ids: bool = False
    """Tell the tokens of each block, with adapter and salt: users' own words."""
    event_format: Literal["array", "map"] = "array"
    """array, or map: what vLLM's own types read since June 2026."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            found = _ENDPOINT.fullmatch(value)
            require(
                found is not None and int(found[2]) < 65536 if value else name == "replay_endpoint",
                f"{name} must be tcp://HOST:PORT, got {value!r}; HOST may be *, and port 0 takes "
                f"a free one",
            )
        require(
            self.endpoint != self.replay_endpoint or not address_of(self.endpoint)[1],
            f"endpoint and replay_endpoint are both {self.endpoint}; give one of them another port",
        )

    @property
    def on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def address_of(endpoint: str) -> tuple[str, int]:
    """Split a checked endpoint."""
    found = _ENDPOINT.fullmatch(endpoint)
    assert found is not None
    return found[1].strip("[]"), int(found[2])
