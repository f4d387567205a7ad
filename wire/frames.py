"""Frames: how a node answers the router, so that the router moves bytes and parses no JSON per
token.

A node that is asked with `accept: application/vnd.kvrelay.frames` answers with frames instead of
plain OpenAI bytes. Each frame carries ready bytes for the client (`payload`) and beside them what
the router must know to hand the request over or to continue it elsewhere. On the wire: 4 bytes
little-endian length, then one msgpack array.
"""

from __future__ import annotations

import enum

import msgspec

from kvrelay.wire.errors import ErrorBody, NodeFailed
from kvrelay.wire.outputs import Finish, Load, PromptBlocks, TokenLogprobs
from kvrelay.wire.transfer import KvTransferParams

__all__ = [
    "FRAMES_MEDIA_TYPE",
    "LOAD_HEADER",
    "MALFORMED",
    "MAX_FRAME_BYTES",
    "MAX_HANDOVER_BYTES",
    "Frame",
    "FrameKind",
    "FrameReader",
    "pack",
]

FRAMES_MEDIA_TYPE = "application/vnd.kvrelay.frames"
LOAD_HEADER = "x-kvrelay-load"
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises on bytes that are no message; the last one if they are nested too deeply."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
# What a node may be sent of a hand-over, in JSON and beside the client's own body:
# log-probabilities of a long prompt are longer than any prompt may be. A number has up to four
# times as many characters as it has bytes in a frame.
MAX_HANDOVER_BYTES = 4 * MAX_FRAME_BYTES


class FrameKind(enum.IntEnum):
    """TOKENS: some output of one choice. HANDOVER: this leg is done, `params` opens the next. END:
    some output too, and with it all choices have ended. ERROR: it broke.

    TICKET: the prompt is about to be computed, and `params` opens the next leg already; this one
    goes on.
    """

    TOKENS = 0
    HANDOVER = 1
    END = 2
    ERROR = 3
    TICKET = 4


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One step of an answer.

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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def pack(frame: Frame) -> bytes:
    """One frame as bytes."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Cuts a byte stream into frames, wherever the network cut it."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, chunk: bytes) -> list[Frame]:
        """All frames completed by `chunk`. Raises NodeFailed on a frame that is too long or
        malformed.
        """
        self._buffer += chunk
        frames: list[Frame] = []
        start, end = 0, len(self._buffer)
        while end - start >= 4:
            size = int.from_bytes(self._buffer[start : start + 4], "little")
            if size > self._max_frame_bytes:
                raise NodeFailed(
                    f"a node sent a frame of {size} bytes; the limit is {self._max_frame_bytes}"
                )
            if end - start - 4 < size:
                break
            try:
                frames.append(
                    _decoder.decode(memoryview(self._buffer)[start + 4 : start + 4 + size])
                )
            except MALFORMED as why:
                raise NodeFailed(f"a node sent a malformed frame: {why}") from why
            start += 4 + size
        del self._buffer[:start]
        return frames

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame; not zero at the end of a stream means that it was cut."""
        return len(self._buffer)
