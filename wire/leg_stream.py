"""The leg stream: one connection between a router and a node that carries all of their legs.

A POST to LEGS_PATH whose request and response bodies last as long as the connection does; both are
made of messages. A message is 9 bytes, little-endian (length of its body, number of its leg, kind),
and its body. The router numbers legs and never uses a number twice. Whoever breaks a rule loses the
connection.

A leg's frames wait for nobody else's reader: a node sends at most WINDOW_BYTES of a leg's messages
that the router has not given back as CREDIT (a message that is longer than what is left of that is
sent, the next one waits).
"""

from __future__ import annotations

import enum
import struct

import msgspec

from kvrelay.wire.errors import ErrorBody, NodeFailed
from kvrelay.wire.frames import MAX_FRAME_BYTES, Frame
from kvrelay.wire.outputs import Load

__all__ = [
    "HEAD_BYTES",
    "LEGS_MEDIA_TYPE",
    "LEGS_PATH",
    "LEGS_VERSION_HEADER",
    "WINDOW_BYTES",
    "Answer",
    "Kind",
    "MessageReader",
    "Open",
    "credit",
    "credit_of",
    "frame_message",
    "frame_of",
    "message",
]

LEGS_PATH = "/kv/legs"
LEGS_MEDIA_TYPE = "application/vnd.kvrelay.legs"
LEGS_VERSION_HEADER = "x-kvrelay-legs"
"""Of the POST: which version of it this is (wire/versions.py). Without the header it is 1."""
WINDOW_BYTES = 1 << 20

_HEAD = struct.Struct("<IIB")
_CREDIT = struct.Struct("<I")
HEAD_BYTES = _HEAD.size
"""Of each message; they count as its body does."""


class Kind(enum.IntEnum):
    """From the router: OPEN a leg, CANCEL it, CREDIT (4 bytes, a number of bytes), PING (leg 0).

    From the node: ANSWER, whether the leg is taken; then its FRAMEs, the last of which is one that
    ends a leg; OVER, if there will be no such frame; PONG (leg 0).
    """

    OPEN = 0
    CANCEL = 1
    CREDIT = 2
    PING = 3
    ANSWER = 4
    FRAME = 5
    OVER = 6
    PONG = 7


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A leg, as it would be posted: the path of its route, the headers that say something of it,
    its body.
    """

    path: str
    headers: dict[str, str]
    body: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """200 and the node's load, or the status of an error, and the seconds after which to try again."""

    status: int
    load: Load | None = None
    error: ErrorBody | None = None
    retry_after_s: int | None = None


_frame_encoder = msgspec.msgpack.Encoder()


def message(kind: Kind, leg: int = 0, body: bytes = b"") -> bytes:
    """One message."""
    return _HEAD.pack(len(body), leg, kind) + body


def frame_message(leg: int, frame: Frame) -> bytes:
    """A FRAME message."""
    return message(Kind.FRAME, leg, _frame_encoder.encode(frame))


def credit_of(body: bytes | memoryview) -> int:
    """The bytes of a CREDIT message, or what a CREDIT of nothing would be if it is malformed."""
    return int(_CREDIT.unpack(body)[0]) if len(body) == _CREDIT.size else 0


def credit(leg: int, size: int) -> bytes:
    """A CREDIT message."""
    return message(Kind.CREDIT, leg, _CREDIT.pack(size))


frame_of = msgspec.msgpack.Decoder(Frame).decode
"""The frame of a FRAME message. Raises one of MALFORMED."""


class MessageReader:
    """Cuts a byte stream into messages, wherever the network cut it."""

    def __init__(self, max_body_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._rest = bytearray()
        self._wanted = _HEAD.size
        """Bytes that there must be before anything can be cut off."""

    def feed(self, chunk: bytes) -> list[tuple[int, int, memoryview]]:
        """Leg, kind and body of all messages completed by `chunk`. Raises NodeFailed if one is too
        long.
        """
        if self._rest:
            self._rest += chunk
            if len(self._rest) < self._wanted:
                return []
            chunk = bytes(self._rest)
            self._rest.clear()
        found = []
        view, at, end = memoryview(chunk), 0, len(chunk)
        self._wanted = _HEAD.size
        while end - at >= _HEAD.size:
            size, leg, kind = _HEAD.unpack_from(chunk, at)
            if size > self._max_body_bytes:
                raise NodeFailed(
                    f"a message of {size} bytes came; the limit is {self._max_body_bytes}"
                )
            begin = at + _HEAD.size
            if end - begin < size:
                self._wanted = _HEAD.size + size
                break
            at = begin + size
            found.append((leg, kind, view[begin:at]))
        self._rest += view[at:]
        return found

    @property
    def pending(self) -> int:
        """Bytes of an unfinished message."""
        return len(self._rest)
