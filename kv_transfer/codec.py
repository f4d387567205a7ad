"""Typed values as msgpack frames of a limited size: how all of kv_transfer's messages are written
and read.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["Codec"]

T = TypeVar("T")


class Codec(Generic[T]):
    """Of one family of messages; `T` is their union."""

    def __init__(self, messages: Any, limit: int) -> None:
        """`messages`: the union; `limit`: bytes of a frame."""
        self.limit = limit
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(messages)

    def encode(self, message: T) -> bytes:
        """One frame. Raises ValueError beyond the size limit."""
        frame = self._encoder.encode(message)
        self._check(frame)
        return frame

    def decode(self, frame: bytes) -> T:
        """Raises msgspec.DecodeError (also for wrong types), or ValueError: too long, or nested too
        deeply.
        """
        self._check(frame)
        try:
            return self._decoder.decode(frame)
        except RecursionError as why:
            raise ValueError("the message is nested too deeply") from why

    def _check(self, frame: bytes) -> None:
        if len(frame) > self.limit:
            raise ValueError(f"message of {len(frame)} bytes is over the limit of {self.limit}")
