"""The GGUF header: every kind of value, and files that are cut short, damaged or lie about their
lengths.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.wire.gguf_header import TensorPlace, read_gguf_header


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def many(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def gguf(values: list[bytes], tensors: list[bytes], version: int = 3, behind: int = 256) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(values))
    return b"GGUF" + counts + b"".join(values) + b"".join(tensors) + bytes(behind)


# Each GGUF type, its struct format and a value; 7 is a truth value, 6 and 12 are floats.
NUMBERS: list[tuple[int, str, Any]] = [
    (0, "B", 200),
    (1, "b", -100),
    (2, "H", 60_000),
    (3, "h", -30_000),
    (4, "I", 4_000_000_000),
    (5, "i", -2_000_000_000),
    (6, "f", 0.5),
    (7, "?", True),
    (10, "Q", 2**63),
    (11, "q", -(2**62)),
    (12, "d", 0.1),
]
WHOLE = gguf(
    [
        *(
            entry(f"number.{kind}", kind, struct.pack(f"<{form}", value))
            for kind, form, value in NUMBERS
        ),
        *(
            entry(f"list.{kind}", 9, many(kind, [struct.pack(f"<{form}", value)] * 3))
            for kind, form, value in NUMBERS
        ),
        entry("name", 8, text("é")),
        entry("tokens", 9, many(8, [text("a"), text(""), text("ł")])),
        entry("general.alignment", 4, struct.pack("<I", 64)),
    ],
    [tensor("a.weight", (32, 5), 8, 0), tensor("b", (), 0, 192)],
)


def test_every_kind_of_value_is_read() -> None:
    metadata = read_gguf_header(WHOLE).metadata
    for kind, _, value in NUMBERS:
        assert metadata[f"number.{kind}"] == value
        assert metadata[f"list.{kind}"] == [value] * 3
    assert metadata["number.7"] is True
    assert (metadata["name"], metadata["tokens"]) == ("é", ["a", "", "ł"])


def test_tensors_lie_behind_the_header_at_the_alignment() -> None:
    base = -(-(len(WHOLE) - 256) // 64) * 64
    assert read_gguf_header(WHOLE).tensors == {
        "a.weight": TensorPlace((5, 32), 8, base),
        "b": TensorPlace((), 0, base + 192),
    }
    assert read_gguf_header(gguf([], [tensor("t", (3,), 0, 0)])).tensors["t"].start % 32 == 0


def test_a_header_cut_anywhere_is_refused() -> None:
    for size in range(len(WHOLE) - 256):
        with pytest.raises(ValueError, match=r"cut short|does not start with GGUF"):
            read_gguf_header(WHOLE[:size])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK" + WHOLE[2:], "does not start with GGUF"),
        (gguf([], [], version=1), "version 1 is not supported"),
        (gguf([], [], version=3 << 24), "little-endian"),
        (gguf([entry("x", 13, b"")], []), "unknown metadata type 13"),
        (gguf([entry("x", 9, many(9, []))], []), "unknown metadata type 9"),
        (gguf([entry("general.alignment", 4, bytes(4))], []), "general.alignment is 0"),
        (gguf([entry("split.count", 2, b"\x03\x00")], []), "one part of a split model"),
        (gguf([], [tensor("t", (1,) * 9, 0, 0)]), "9 dimensions"),
        (gguf([entry("x", 8, struct.pack("<Q", 2) + b"\xff\xff")], []), "utf-8"),
    ],
)
def test_what_cannot_be_read_is_named(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_gguf_header(content)


@pytest.mark.parametrize("claimed", [2**20, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "form",
    [
        lambda count: b"GGUF" + struct.pack("<IQQ", 3, count, 0) + bytes(4096),
        lambda count: b"GGUF" + struct.pack("<IQQ", 3, 0, count) + bytes(4096),
        lambda count: gguf([entry("x", 8, struct.pack("<Q", count))], [], behind=4096),
        lambda count: gguf([entry("x", 9, struct.pack("<IQ", 8, count))], [], behind=4096),
        lambda count: gguf([entry("x", 9, struct.pack("<IQ", 12, count))], [], behind=4096),
        lambda count: gguf(
            [entry("x", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", count))], [], behind=4096
        ),
    ],
)
def test_a_length_that_lies_costs_neither_time_nor_memory(form: Any, claimed: int) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="cut short"):
        read_gguf_header(form(claimed))
    assert time.process_time() - began < 0.5


@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=9))
def test_a_damaged_header_is_read_or_refused_and_nothing_else(at: int, damage: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_gguf_header(WHOLE[:at] + damage + WHOLE[at + len(damage) :])
