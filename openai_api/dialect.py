"""What a client's dialect must be able to say. Inside the cluster there are chat completions only;
an answer is put into the client's own words where it leaves.

Owns the interface and its trivial case, chat completions themselves. The others:
openai_api/responses_answer.py, openai_api/anthropic_answer.py. Light: neither tokenizer nor
template, so that the router can speak all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvrelay.wire.errors import ErrorBody

__all__ = ["AS_IS", "KEEP_ALIVE", "Dialect", "Speak", "as_it_is", "openai_error"]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients of any dialect skip it."""


class Dialect(Protocol):
    """One answer, from the bytes of a chat completion to those that the client wants. Used for one
    answer only.
    """

    chat: bool
    """False: it is made of a text completion instead."""

    def events(self, payload: bytes) -> bytes:
        """Bytes of a streamed chat completion, cut anywhere, as events; an error event in them too."""
        ...

    def keep_alive(self) -> bytes:
        """What is sent when nothing has come for a while."""
        ...

    def whole(self, body: bytes) -> bytes:
        """A whole chat completion as a whole answer. Raises NodeFailed if it is none."""
        ...

    def error(self, status: int, error: ErrorBody) -> bytes:
        """The body of an error answer."""
        ...


Speak = Callable[[bytes], tuple[bytes, Dialect]]
"""From a request body to that of a chat completion, and the dialect of its answer. Raises
RequestError.
"""


def openai_error(status: int, error: ErrorBody) -> bytes:
    """`{"error": {...}}`."""
    return msgspec.json.encode({"error": error})


class _AsIs:
    """Chat completions (and text completions): a move of bytes."""

    chat = True

    def events(self, payload: bytes) -> bytes:
        return payload

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def whole(self, body: bytes) -> bytes:
        return body

    def error(self, status: int, error: ErrorBody) -> bytes:
        return openai_error(status, error)


AS_IS: Dialect = _AsIs()


def as_it_is(body: bytes) -> tuple[bytes, Dialect]:
    """The Speak of chat and text completions."""
    return body, AS_IS
