"""Frames, by which a node answers a router, and the stream that carries them.

A frame has the bytes for the client (`payload`) and what a router needs to hand over or continue
the request without parsing JSON.

The leg stream is one connection between a router and a node for all of their requests ("legs"): a
POST to LEGS_PATH whose bodies last as long as the connection. Both are made of messages: 9 bytes
little-endian (length of the body, leg, kind), and the body. Leg numbers are never reused. Whoever
breaks a rule loses the connection. A node sends at most WINDOW_BYTES of a leg's messages beyond the
router's CREDIT (a longer message is sent, the next one waits).
"""

from __future__ import annotations

import enum
import struct

import msgspec

from kvrelay.wire.errors import ErrorBody, NodeFailed
from kvrelay.wire.ladder import Found
from kvrelay.wire.outputs import Finish, Load, PromptBlocks, TokenLogprobs
from kvrelay.wire.transfer import KvTransferParams

__all__ = [
    "HEAD_BYTES",
    "LEGS_MEDIA_TYPE",
    "LEGS_PATH",
    "LEGS_VERSION_HEADER",
    "MALFORMED",
    "MAX_FRAME_BYTES",
    "MAX_HANDOVER_BYTES",
    "WINDOW_BYTES",
    "Answer",
    "Frame",
    "FrameKind",
    "Kind",
    "MessageReader",
    "Open",
    "credit",
    "credit_of",
    "frame_message",
    "frame_of",
    "message",
]

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that decoding raises on malformed or too deeply nested bytes."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
# What a node may be sent of a hand-over, in JSON and beside the client's body: a long prompt's
# log-probabilities outgrow any prompt. Numbers in JSON are up to four times as long as in a frame.
MAX_HANDOVER_BYTES = 4 * MAX_FRAME_BYTES


class FrameKind(enum.IntEnum):
    """A kind of frame.

    TOKENS: output of one choice. HANDOVER: this leg is done, `params` opens the next. END: output,
    with which all choices have ended. ERROR: it broke. TICKET: the prompt is about to be computed,
    and `params` opens the next leg beside this one.
    """

    TOKENS = 0
    HANDOVER = 1
    END = 2
    ERROR = 3
    TICKET = 4


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A step of an answer.

    `payload` goes to the client as it is: SSE events, or in an END frame the whole JSON body.
    `token_ids` and `logprobs` are of `choice`, `sent_text` counts the characters of its text so
    far, `finish` is why it has ended. `load` is in TICKET frames, a leg's first frame with tokens
    and its last. `status` and `error` are of ERROR frames, `params` of TICKET and HANDOVER frames.
    """

    kind: FrameKind
    payload: bytes = b""
    token_ids: list[int] = []
    sent_text: int = 0
    params: KvTransferParams | None = None
    load: Load | None = None
    status: int = 200
    error: ErrorBody | None = None
    timing: dict[str, float] | None = None
    choice: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    usage: tuple[int, int, int] | None = None
    """In END frames: prompt, generated and cached tokens."""
    blocks: PromptBlocks | None = None
    """In TICKET frames, names of the prompt's blocks, as in KV events; in END frames also of the
    first choice's, unless it has thoughts, which the next turn's prompt has not.
    """
    kv_error: str = ""
    """Once, in a decode leg whose KV did not come: the cause's name in wire/errors.py."""
    found: Found | None = None
    """From the node that computes the prompt, in its TICKET and its last frame."""
    written: int = 0
    """In END frames: tokens of the prompt that were not cached and are pinned now."""


LEGS_PATH = "/kv/legs"
LEGS_MEDIA_TYPE = "application/vnd.kvrelay.legs"
LEGS_VERSION_HEADER = "x-kvrelay-legs"
"""Version of the POST (wire/versions.py); 1 without it."""
WINDOW_BYTES = 1 << 20

_HEAD = struct.Struct("<IIB")
_CREDIT = struct.Struct("<I")
HEAD_BYTES = _HEAD.size


class Kind(enum.IntEnum):
    """A kind of message.

    From the router: OPEN a leg, CANCEL it, CREDIT (4 bytes, a number of bytes), PING (leg 0). From
    the node: ANSWER, whether the leg is taken; FRAMEs, the last of which ends the leg; OVER, if
    there will be no such frame; PONG (leg 0).
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
    """A leg, as it would be posted."""

    path: str
    headers: dict[str, str]
    body: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """An answer: 200 and the node's load, or an error and when to try again."""

    status: int
    load: Load | None = None
    error: ErrorBody | None = None
    retry_after_s: int | None = None


_frame_encoder = msgspec.msgpack.Encoder()


def message(kind: Kind, leg: int = 0, body: bytes = b"") -> bytes:
    return _HEAD.pack(len(body), leg, kind) + body


def frame_message(leg: int, frame: Frame) -> bytes:
    return message(Kind.FRAME, leg, _frame_encoder.encode(frame))


def credit_of(body: bytes | memoryview) -> int:
    """Return the bytes of a CREDIT message; 0 if it is malformed."""
    return int(_CREDIT.unpack(body)[0]) if len(body) == _CREDIT.size else 0


def credit(leg: int, size: int) -> bytes:
    return message(Kind.CREDIT, leg, _CREDIT.pack(size))


frame_of = msgspec.msgpack.Decoder(Frame).decode
"""Read a FRAME message. Raises one of MALFORMED."""


class MessageReader:
    def __init__(self, max_body_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._rest = bytearray()
        self._wanted = _HEAD.size
        """Bytes that there must be before anything can be cut off."""

    def feed(self, chunk: bytes) -> list[tuple[int, int, memoryview]]:
        """Return leg, kind and body of each completed message. Raises NodeFailed if one is too
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
        """Return the bytes of an unfinished message."""
        return len(self._rest)
