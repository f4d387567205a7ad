"""KV events: names of KV blocks, and what a node tells of its prefix cache.

Names are chained hashes over little-endian 32-bit token ids from a fixed root, equal on all nodes.
Only full blocks are hashed.

A PUB socket sends (nothing, sequence number as 8 bytes big-endian, batch as msgpack). A ROUTER
socket answers a number with (number, batch), or, if that number is the next one, (END, nothing):
the batch begins with AllBlocksCleared and stores all that is held. A batch is the array (time,
events), an event the array of its kind and its fields.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from kvrelay.wire.config_checks import require
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


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A set of blocks is held now."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    """Not used; routers of the last release want the field."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A set of blocks is held no more."""

    block_hashes: list[BlockHash]


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An event: no block is held."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch of changes in order; `ts` is a Unix second."""

    ts: float
    events: list[Event]


class KvEventsReport(msgspec.Struct, frozen=True):
    """A part of a node's health report: ports of its KV events."""

    port: int
    replay_port: int
    next_number: int
    """Number of the next batch."""


pack_batch = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(EventBatch)


def read_batch(payload: bytes) -> EventBatch:
    """Read a batch. Raises NodeFailed."""
    try:
        return _decoder.decode(payload)
    except MALFORMED as why:
        raise NodeFailed(f"a node sent malformed KV events: {why}") from why


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


def key_of(block_hash: BlockHash) -> int:
    """Return 64 bits of a hash, enough to choose a node by."""
    return int.from_bytes(block_hash[:_KEY_BYTES], sys.byteorder)


def keys_of(hashes: Iterable[BlockHash]) -> list[int]:
    return [key_of(block_hash) for block_hash in hashes]


# The port comes after the last colon, also of an IPv6 number without brackets, as zmq has it.
_ENDPOINT = re.compile(r"tcp://(\*|\[[^\s/\[\]*]+\]|[^\s/\[\]*]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """A choice of where a node tells KV events, and what they say."""

    enable_kv_cache_events: bool = False
    """Tell which blocks the prefix cache holds."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Where events are told, tcp://HOST:PORT; * is all addresses, port 0 a free one."""
    replay_endpoint: str = "tcp://127.0.0.1:5558"
    """Where all that is held is told again."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            found = _ENDPOINT.fullmatch(value := getattr(self, name))
            require(
                found is not None and int(found[2]) < 65536,
                f"{name} must be tcp://HOST:PORT, got {value!r}; HOST may be *, and port 0 takes "
                f"a free one",
            )
        require(
            self.endpoint != self.replay_endpoint or not address_of(self.endpoint)[1],
            f"endpoint and replay_endpoint are both {self.endpoint}; give one of them another port",
        )


def address_of(endpoint: str) -> tuple[str, int]:
    """Split a checked endpoint."""
    found = _ENDPOINT.fullmatch(endpoint)
    assert found is not None
    return found[1].strip("[]"), int(found[2])
