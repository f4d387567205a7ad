"""Server-sent events, and the answers to several prompts as one. Light and pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
from msgspec import Raw

from kvrelay.openai_api.types import Answer, Usage
from kvrelay.wire.errors import KvrelayError

__all__ = [
    "DONE",
    "error_event",
    "event",
    "joined_body",
    "joined_end",
    "summed_usage",
]

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


def error_event(error: KvrelayError) -> bytes:
    """Return the end of a broken stream, for which the official client raises APIError."""
    return event(error.json()) + DONE


_encode = msgspec.json.Encoder().encode


def joined_body(bodies: Sequence[bytes], usage: Usage) -> bytes:
    """Return several prompts' bodies as one, with all choices."""
    parts = [msgspec.json.decode(body, type=dict[str, Raw]) for body in bodies]
    choices = [msgspec.json.decode(part["choices"], type=list[Raw]) for part in parts]
    return _encode({**parts[0], "choices": [*chain(*choices)], "usage": usage})


def joined_end(
    usage: Usage,
    response_id: str,
    created: int,
    model: str,
    *,
    include_usage: bool,
) -> bytes:
    """Return the end of a joined stream: usage, if asked for, and [DONE]."""
    if not include_usage:
        return DONE
    chunk = Answer(response_id, "text_completion", created, model, [], usage)
    return event(_encode(chunk)) + DONE


def summed_usage(counts: Sequence[tuple[int, int, int, int]]) -> Usage:
    """Return the usage of prompts by their prompt, generated, cached and written tokens."""
    return Usage.from_counts(*(sum(each) for each in zip(*counts, strict=True)))
