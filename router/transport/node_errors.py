"""How legs end: whose fault it is, and what the client is told. Knows no transport."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec

from kvrelay.wire.errors import (
    Draining,
    EngineDead,
    ErrorBody,
    KvNotLoaded,
    KvrelayError,
    NodeFailed,
    RequestBroke,
)
from kvrelay.wire.frames import MALFORMED, Frame, FrameKind
from kvrelay.wire.outputs import Load

__all__ = [
    "LOST",
    "AttemptFailed",
    "Refused",
    "TakeFrame",
    "ending",
    "message_of",
    "refusal",
    "told_error",
]

LOST = "the node stopped answering health checks, was restarted, or says that its engine is dead"
"""Why a leg was cut that the pool has given up."""

TakeFrame = Callable[[Frame], Awaitable[None] | None]
"""Given one frame after the other. What it answers, if anything, is waited for before it is given
more.
"""

_log = logging.getLogger("kvrelay.router")


class _Told(msgspec.Struct):
    """An error as our nodes and newer versions of vLLM wrap it, and as older ones do not."""

    error: _Told | None = None
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Refused(KvrelayError):
    """A node's 4xx, or its KvNotLoaded: the client's to see as it is; no fault of the node."""

    def __init__(
        self, status: int, error: ErrorBody, retry_after_s: int | None, kv_error: str = ""
    ) -> None:
        """`kv_error`: what the node said of KV that did not come (wire/frames.py)."""
        super().__init__(error.message, param=error.param)
        self.status, self.retry_after_s, self.kv_error = status, retry_after_s, kv_error
        self._error = error

    def body(self) -> ErrorBody:
        """The node's own error object."""
        return self._error


class AttemptFailed(NodeFailed):
    """The node broke: no connection, a 5xx, a cut stream, or silence. The leg may be tried on
    another one.
    """

    paid = False
    """It was cut at the cost of the retry budget: another try costs it no more."""
    reading = False
    """It failed as it read the request: whose fault that is another node tells."""
    draining = False
    """The node takes nothing new, and is not to be blamed for it."""

    def __init__(
        self,
        message: str,
        status: int = NodeFailed.status,
        retry_after_s: int | None = None,
        detail: str = "",
        *,
        lost: bool = False,
        reached: bool = True,
    ) -> None:
        """`detail` is for the log: it may name addresses, which are no business of a client."""
        super().__init__(message)
        self.lost = lost
        """Its process or engine seems to be gone: it says so, refused or cut the connection, or is
        silent to health checks too.
        """
        self.reached = reached
        """The process may have had the leg when it was lost: that was not what refused it."""
        self.status, self.retry_after_s, self.detail = status, retry_after_s, detail or message


def ending(frame: Frame, take: TakeFrame) -> FrameKind:
    """Hand on the frame that ends a leg, and return its kind. Raises Refused or AttemptFailed if it did
    not end well.
    """
    if frame.kind is FrameKind.ERROR:
        error = frame.error or ErrorBody("the node gave no reason", NodeFailed.type)
        rests_s = (frame.load or Load()).retry_after_s if frame.status in (429, 503) else None
        if 400 <= frame.status < 500 or error.code == KvNotLoaded.code:
            raise Refused(frame.status, error, rests_s, frame.kv_error)
        raise AttemptFailed(
            error.message, max(frame.status, 500), rests_s, lost=error.code == EngineDead.code
        )
    if frame.kind is FrameKind.HANDOVER and frame.params is None:
        raise AttemptFailed("the node sent a hand-over without its parameters")
    take(frame)
    return frame.kind


def refusal(status: int, error: ErrorBody | None, retry_after_s: int | None) -> KvrelayError:
    """Return what an answer other than 200 means."""
    error = error or ErrorBody(f"a node answered {status} without a reason", NodeFailed.type)
    if status in (401, 403):
        # The client's key is not the nodes' key: this is the operator's mistake, not the client's.
        _log.error(
            "a node refused the router's key; give the router the nodes' key as node_api_key"
        )
        return Refused(
            NodeFailed.status, ErrorBody("a node refused the router's key", NodeFailed.type), None
        )
    if 400 <= status < 500:
        return Refused(status, error, retry_after_s)
    failed = AttemptFailed(error.message, max(status, 500), retry_after_s, reached=False)
    failed.draining, failed.lost = error.code == Draining.code, error.code == EngineDead.code
    failed.reading = error.code == RequestBroke.code
    return failed


def message_of(body: bytes) -> str:
    """Return what an answer says, whether it is an error or not."""
    return _told(body).message or "no message"


def _told(body: bytes) -> _Told:
    try:
        told = msgspec.json.decode(body, type=_Told)
    except MALFORMED:
        return _Told()
    return told.error or told


def told_error(body: bytes, status: int = 500) -> tuple[ErrorBody, int]:
    """Return what a node's answer says of an error, and its status: `status`, unless it names one
    itself.
    """
    told = _told(body)
    own = told.code if isinstance(told.code, int) and 400 <= told.code < 600 else status
    message = told.message or f"a node answered {status} without a reason"
    return ErrorBody(message, told.type or NodeFailed.type, told.param, told.code), own
