"""KV events on the wire: ours, and all the forms in which vLLM and those who speak like it write
them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.kv_events import (
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
    batch = EventBatch(1.5, [BlockRemoved([A]), BlockStored([A, B], None, [], 16)])
    assert read_batch(pack_batch(batch)) == batch
    in_maps = read_batch(pack_batch(batch, maps=True)).events
    assert [msgspec.structs.asdict(event) for event in in_maps] == [
        msgspec.structs.asdict(event) for event in batch.events
    ]
    assert not is_snapshot(batch)
    assert is_snapshot(read_batch(pack_batch(EventBatch(1.5, [AllBlocksCleared()]))))


STORED = {
    "block_hashes": [B, 7],
    "parent_block_hash": -1,
    "token_ids": [1, 2],
    "block_size": 1,
    "lora_id": None,
}
AS_MAP = {
    "type": "BlockStored",
    **STORED,
    "medium": "GPU",
    "lora_name": None,
    "kv_cache_spec_kind": "full",
}
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


# The types of vLLM's listeners, by the year of the release. They ignore what they do not name at
# the end of an array.
class Stored25(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class Removed25(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class Cleared25(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class Batch25(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored25 | Removed25 | Cleared25]


class Stored26(Stored25, tag="BlockStored"):
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed26(Removed25, tag="BlockRemoved"):
    group_idx: int | None = None


class Batch26(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored26 | Removed26 | Cleared25]
    data_parallel_rank: int | None = None


class StoredMap(Stored26, array_like=False, tag="BlockStored"):
    pass


class RemovedMap(Removed26, array_like=False, tag="BlockRemoved"):
    pass


class ClearedMap(Cleared25, array_like=False, tag="AllBlocksCleared"):
    pass


class BatchOfMaps(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


@pytest.mark.parametrize(
    ("listener", "maps"), [(Batch25, False), (Batch26, False), (BatchOfMaps, True)]
)
def test_a_listener_that_knows_vllm_s_types_reads_ours(listener: Any, maps: bool) -> None:
    """With all fields that it demands, in their places."""
    stored = BlockStored([A, B], B, [3, 4], 1, None, "GPU", "lora", [["lora"], ["lora"]])
    payload = pack_batch(
        EventBatch(1.0, [AllBlocksCleared(), stored, BlockRemoved([B], "GPU")]), maps=maps
    )
    read = msgspec.msgpack.decode(payload, type=listener)
    told = [msgspec.structs.asdict(event) for event in read.events]
    expected = {
        "block_hashes": [A, B],
        "parent_block_hash": B,
        "token_ids": [3, 4],
        "block_size": 1,
        "lora_id": None,
    }
    expected |= {"medium": "GPU"}
    if listener is not Batch25:
        expected |= {"lora_name": "lora", "extra_keys": [("lora",), ("lora",)], "group_idx": None}
        assert read.data_parallel_rank == 0
    assert told[0] == {}
    assert told[1].items() >= expected.items()
    assert told[2].items() >= {"block_hashes": [B], "medium": "GPU"}.items()


def test_an_event_is_an_array_with_its_kind_first() -> None:
    payload = pack_batch(
        EventBatch(1.0, [BlockStored([A], None, [], 16, medium="GPU"), AllBlocksCleared()])
    )
    stored = ["BlockStored", [A], None, [], 16, None, "GPU", None, None, None]
    assert msgspec.msgpack.decode(payload) == [1.0, [stored, ["AllBlocksCleared"]], 0]


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
    ],
    ids=range(6),
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
