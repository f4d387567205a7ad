"""The metadata of a GGUF file, without its tensors and without numpy.

Reads the header itself: gguf.GGUFReader makes several numpy views per token of the vocabulary and takes 2 s for
SmolLM2's 49,152 tokens; this takes 0.1 s. The engine has a reader of its own for tensors; neither may import the other.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from wire.errors import ConfigError

__all__ = ["read_gguf_metadata"]

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format; 8 is a string, 9 a list."""
_STRING, _LIST = 8, 9


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values (bool, int, float, str, or a list of one of these). Raises ConfigError naming the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(content).metadata()
    except (OSError, ValueError, KeyError, OverflowError, struct.error) as why:
        raise ConfigError(f"{path} is not a readable GGUF file: {why}") from why


class _Header:
    """A cursor over the header of version 2 or 3, little-endian."""

    def __init__(self, content: mmap.mmap) -> None:
        self._bytes = content
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._bytes[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported; 2 and 3 (little-endian) are")
        _tensors, count = self._scalar("Q"), self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(count)}

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        start, self._at = self._at, self._at + size
        if self._at > len(self._bytes):
            raise ValueError(f"it is cut short: a string of {size} bytes at byte {start} of {len(self._bytes)}")
        return self._bytes[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            return self._scalar(_SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        form = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(form, self._bytes, self._at))
        self._at += struct.calcsize(form)
        return values
