"""Server-sent events as bytes."""

from __future__ import annotations

from kvrelay.wire.errors import KvrelayError

__all__ = ["DONE", "SSE_MEDIA_TYPE", "error_event", "event"]

SSE_MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One event with one line of data; `payload` is JSON and so holds no line break."""
    return b"data: %b\n\n" % payload


def error_event(error: KvrelayError) -> bytes:
    """How a stream that has begun ends when it breaks. The official client raises APIError from it."""
    return event(error.json()) + DONE
