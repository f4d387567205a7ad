"""KV events on the wire, and as the release before reads and writes them."""

from __future__ import annotations

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
    number_of,
    pack_batch,
    packed_number,
    read_batch,
)

A, B = b"a" * 16, b"b" * 16


def test_what_was_packed_is_read() -> None:
    batch = EventBatch(1.5, [BlockRemoved([A]), BlockStored([A, B])])
    packed = pack_batch(batch)
    assert read_batch(packed) == batch
    assert not is_snapshot(batch)
    assert is_snapshot(read_batch(pack_batch(EventBatch(1.5, [AllBlocksCleared()]))))
    # A router of commit aa75eb93 wants at least these fields, in this order.
    assert msgspec.msgpack.decode(packed) == [
        1.5,
        [["BlockRemoved", [A]], ["BlockStored", [A, B], None]],
    ]


def test_a_node_of_the_release_before_is_read() -> None:
    stored = ["BlockStored", [A], B, [], 16, None, "GPU", None, None, None]
    batch = [1.0, [["AllBlocksCleared"], stored, ["BlockRemoved", [B], "GPU", None]], 0]
    cleared, held, removed = read_batch(msgspec.msgpack.encode(batch)).events
    assert cleared == AllBlocksCleared()
    assert isinstance(held, BlockStored)
    assert held.block_hashes == [A]
    assert removed == BlockRemoved([B])


DEEP = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgspec.msgpack.encode([1.0, [["Unheard", 1]]]),
        b"\x81\xa2ts" + DEEP,
        b"\x93\xcb" + bytes(8) + b"\x90" + DEEP,
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


def test_a_key_is_64_bits_of_a_hash() -> None:
    assert 0 <= key_of(A) < 2**64
    assert key_of(A) == key_of(A + b"more") != key_of(B)
