"""KV events on the wire: what a release writes, the next one reads."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.kv_events import CacheChanges, keys_of, read_changes

A, B = b"a" * 16, b"b" * 16


def test_changes_are_read_as_this_release_writes_them() -> None:
    changes = CacheChanges([A, B], [B], cleared=True)
    packed = {"type": "CacheChanges", "stored": [A, B], "removed": [B], "cleared": True}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(changes)) == packed
    assert read_changes(msgspec.msgpack.encode(packed | {"later": 1})) == changes


DEEP = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", b"\x81\xa2ts" + DEEP], ids=range(4))
def test_what_is_malformed_is_refused(payload: bytes) -> None:
    with pytest.raises(MALFORMED):
        read_changes(payload)


def test_a_key_is_64_bits_of_a_hash() -> None:
    a, same, b, short = keys_of([A, A + b"more", B, b"x"])
    assert a == same != b
    assert 0 <= short < 2**64 > a
