"""Frames as an answer to a caller that knows none: plain OpenAI bytes, with the request's stages if
it asked for them.

Owns what such a caller sees of a hand-over: an answer of one token.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.stages import with_stages
from kvrelay.wire.frames import Frame, FrameKind

__all__ = ["payloads", "whole"]


async def payloads(
    first: Frame, frames: AsyncGenerator[Frame, None], leg: NodeRequest, since: float | None
) -> AsyncIterator[bytes]:
    """The bytes of a streamed answer. `since`: if the caller asks for stages, the monotonic second
    of its arrival.
    """
    async with contextlib.aclosing(frames):
        yield _plain(first, leg, since)
        async for frame in frames:
            yield _plain(frame, leg, since)


def _plain(frame: Frame, leg: NodeRequest, since: float | None) -> bytes:
    """A frame's bytes to a caller that knows none; to it, a hand-over looks like an answer of one
    token.
    """
    payload = frame.payload + (leg.writer.cut() if frame.kind is FrameKind.HANDOVER else b"")
    return _timed(payload, frame, since)


def _timed(payload: bytes, frame: Frame, since: float | None) -> bytes:
    """With the stages at its end, if they were asked for."""
    if since is None or frame.kind not in (FrameKind.END, FrameKind.HANDOVER):
        return payload
    return with_stages(payload, {**(frame.timing or {}), "total": (time.monotonic() - since) * 1e3})


async def whole(
    first: Frame, frames: AsyncGenerator[Frame, None], leg: NodeRequest, since: float | None
) -> tuple[int, bytes]:
    """Status and JSON body of an answer that is not streamed."""
    async with contextlib.aclosing(frames):
        frame = first
        while frame.kind in (FrameKind.TOKENS, FrameKind.TICKET):
            frame = await anext(frames)
    if frame.kind is FrameKind.ERROR:
        return frame.status, msgspec.json.encode({"error": frame.error})
    if frame.kind is FrameKind.HANDOVER and frame.params is not None:
        # A third-party proxy delivers nothing itself: the decode node emits the first token too.
        answer = leg.writer.cut(msgspec.structs.replace(frame.params, sent_text=None))
        return 200, _timed(answer, frame, since)
    return 200, _timed(frame.payload, frame, since)
