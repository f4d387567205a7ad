"""The words of the control channel."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    Refused,
    decode,
    encode,
)
from kvrelay.wire.transfer import Fingerprint

FINGERPRINT = Fingerprint(1, "m", "bfloat16", 16, 3, 64, 30, 0, 1)
LEASE = LeaseId("r", 7)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xff", b"hello", msgspec.msgpack.encode({"type": "renew"}), b"\x93\x01\x02\x03"],
)
def test_garbage_is_a_decode_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(frame)


def test_nesting_that_nobody_writes_is_a_value_error() -> None:
    depth = 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(b"\x82\xa4type\xa5renew\xa1x" + b"\x91" * depth + b"\xc0")


def test_messages_over_the_limit_are_neither_sent_nor_read() -> None:
    with pytest.raises(ValueError, match=f"over the limit of {MAX_MESSAGE_BYTES}"):
        encode(Refused("x" * MAX_MESSAGE_BYTES))
    with pytest.raises(ValueError, match=f"over the limit of {MAX_MESSAGE_BYTES}"):
        decode(b"x" * (MAX_MESSAGE_BYTES + 1))
