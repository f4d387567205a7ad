"""Frames, by which a node answers a router, and the stream that carries them.

A frame has ready bytes for the client (`payload`) and beside them what the router must know to hand
the request over or to continue it elsewhere, so that a router parses no JSON per token.

The leg stream is one connection between a router and a node for all of their requests ("legs"): a
POST to LEGS_PATH whose request and response bodies last as long as the connection does. Both are
made of messages: 9 bytes, little-endian (length of its body, number of its leg, kind), and a body.
The router numbers legs and never uses a number twice. Whoever breaks a rule loses the connection. A
node sends at most WINDOW_BYTES of a leg's messages that the router has not given back as CREDIT (a
message that is longer than what is left is sent, the next one waits).
"""

from __future__ import annotations

import enum
import struct

import msgspec

from kvrelay.wire.errors import ErrorBody, NodeFailed
from kvrelay.wire.outputs import Finish, Load, PromptBlocks, TokenLogprobs
from kvrelay.wire.transfer import KvTransferParams

__all__ = [
    "HEAD_BYTES",
    "LEGS_MEDIA_TYPE",
    "LEGS_PATH",
    "LEGS_VERSION_HEADER",
    "LOAD_HEADER",
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

LOAD_HEADER = "x-kvrelay-load"
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises on bytes that are no message; the last one if they are nested too deeply."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
# What a node may be sent of a hand-over, in JSON and beside the client's own body:
# log-probabilities of a long prompt are longer than any prompt may be. A number has up to four
# times as many characters as it has bytes in a frame.
MAX_HANDOVER_BYTES = 4 * MAX_FRAME_BYTES


class FrameKind(enum.IntEnum):
    """A kind of frame.

    TOKENS: some output of one choice. HANDOVER: this leg is done, `params` opens the next. END:
    some output too, and with it all choices have ended. ERROR: it broke. TICKET: the prompt is
    about to be computed, and `params` opens the next leg already; this one goes on.
    """

    TOKENS = 0
    HANDOVER = 1
    END = 2
    ERROR = 3
    TICKET = 4


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A step of an answer.

    `payload` goes to the client as it is: SSE events when the client streams; in an END frame of an
    answer that is not streamed, the whole JSON body. `token_ids` are the tokens of `choice` that
    this frame is about (`logprobs` theirs, if the client asks for any), `sent_text` the characters
    of its text sent in total after it, `finish` why that choice has ended with it. `load` is in
    TICKET frames, in a leg's first one with tokens and in its last one. `status` and `error` are
    set in ERROR frames, `params` in TICKET and HANDOVER frames.
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
    """In END frames: tokens of the prompt, generated ones, and those of the prompt that a prefix
    cache held.
    """
    blocks: PromptBlocks | None = None
    """In TICKET frames: what the prompt's blocks are called, so that a router knows them in KV
    events.
    """
    kv_error: str = ""
    """Of a decode leg whose KV did not come, once: the name of the cause in wire/errors.py."""


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
    """A kind of message.

    From the router: OPEN a leg, CANCEL it, CREDIT (4 bytes, a number of bytes), PING (leg 0). From
    the node: ANSWER, whether the leg is taken; then its FRAMEs, the last of which ends the leg;
    OVER, if there will be no such frame; PONG (leg 0).
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
    """An answer: 200 and the node's load, or an error's status and when to try again."""

    status: int
    load: Load | None = None
    error: ErrorBody | None = None
    retry_after_s: int | None = None


_frame_encoder = msgspec.msgpack.Encoder()


def message(kind: Kind, leg: int = 0, body: bytes = b"") -> bytes:
    """One message."""
    return _HEAD.pack(len(body), leg, kind) + body


def frame_message(leg: int, frame: Frame) -> bytes:
    """Return a FRAME message."""
    return message(Kind.FRAME, leg, _frame_encoder.encode(frame))


def credit_of(body: bytes | memoryview) -> int:
    """Return the bytes of a CREDIT message; 0 if it is malformed."""
    return int(_CREDIT.unpack(body)[0]) if len(body) == _CREDIT.size else 0


def credit(leg: int, size: int) -> bytes:
    """Return a CREDIT message."""
    return message(Kind.CREDIT, leg, _CREDIT.pack(size))


frame_of = msgspec.msgpack.Decoder(Frame).decode
"""The frame of a FRAME message. Raises one of MALFORMED."""


class MessageReader:
    """A reader that cuts a byte stream into messages, wherever the network cut it."""

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
