"""KV events on the wire: ours, and all the forms in which vLLM and those who speak like it write them."""

from __future__ import annotations

import msgspec
import pytest

from wire.errors import NodeFailed
from wire.kv_events import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    is_snapshot,
    key_of,
    keys_of,
    number_of,
    pack_batch,
    packed_number,
    read_batch,
)

A, B = b"a" * 16, b"b" * 32


def test_what_was_packed_is_read() -> None:
    batch = EventBatch(1.5, [BlockRemoved([A]), BlockStored([A, B], None, [], 16)], "g1")
    assert read_batch(pack_batch(batch)) == batch
    assert not is_snapshot(batch)
    assert is_snapshot(read_batch(pack_batch(EventBatch(1.5, [AllBlocksCleared()]))))


STORED = {"block_hashes": [B, 7], "parent_block_hash": -1, "token_ids": [1, 2], "block_size": 1, "lora_id": None}
AS_MAP = {"type": "BlockStored", **STORED, "medium": "GPU", "lora_name": None, "kv_cache_spec_kind": "full"}
AS_ARRAY = ["BlockStored", *STORED.values(), "GPU", None, None, 0, "full"]
OLD_ARRAY = ["BlockStored", *STORED.values()]


@pytest.mark.parametrize("event", [AS_MAP, AS_ARRAY, OLD_ARRAY], ids=["map", "array", "old array"])
@pytest.mark.parametrize("batch_is_map", [True, False])
def test_all_forms_are_read(event: object, batch_is_map: bool) -> None:
    more = {"type": "AllBlocksCleared"} if isinstance(event, dict) else ["AllBlocksCleared"]
    parts = {"ts": 1.0, "events": [event, more], "data_parallel_rank": 0}
    batch = read_batch(msgspec.msgpack.encode(parts if batch_is_map else list(parts.values())))
    stored, cleared = batch.events
    assert isinstance(stored, BlockStored)
    assert isinstance(cleared, AllBlocksCleared)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([B, 7], -1, [1, 2])
    assert batch.generation == ""


class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class Batch(msgspec.Struct):
    ts: float
    events: list[Stored | Removed]
    data_parallel_rank: int | None = None


def test_a_listener_that_knows_vllm_s_types_reads_ours() -> None:
    """With all fields that it demands, and those of ours ignored."""

    payload = pack_batch(EventBatch(1.0, [BlockStored([A], B, [], 16), BlockRemoved([B])], "g1"))
    assert msgspec.msgpack.decode(payload, type=Batch).events == [
        Stored([A], B, [], 16, None, None, None),
        Removed([B], None),
    ]


DEEP = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgspec.msgpack.encode([1.0, [["Unheard", 1]]]),
        b"\x81\xa2ts" + DEEP,
        b"\x82\xa1x" + DEEP + b"\xa2ts\x01",
        b"\x83\xa2ts\x01\xa6events\x90\xaageneration\xa1\xff",
    ],
    ids=range(7),
)
def test_what_is_malformed_is_refused(payload: bytes) -> None:
    with pytest.raises(NodeFailed, match="malformed KV events"):
        read_batch(payload)


def test_sequence_numbers() -> None:
    assert number_of(packed_number(258)) == 258
    assert number_of(END) > 2**62
    with pytest.raises(NodeFailed, match="8 bytes, got 3"):
        number_of(b"123")


def test_a_key_is_64_bits_of_any_hash() -> None:
    keys = keys_of([A, B, -1, 2**64 - 1, 5])
    assert all(0 <= key < 2**64 for key in keys)
    assert keys[2] == keys[3]
    assert len(set(keys)) == 4
    assert key_of(A) == key_of(A + b"more")
