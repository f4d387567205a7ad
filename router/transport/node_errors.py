"""Errors of requests to nodes: whose fault they are, and what the client is told."""

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
    "OnFrame",
    "Refused",
    "deliver_last",
    "error_of_status",
    "parse_error",
    "parse_message",
]

LOST = "the node stopped answering health checks, was restarted, or says that its engine is dead"

OnFrame = Callable[[Frame], Awaitable[None] | None]
"""Called with each frame; its result is awaited before the next."""

_log = logging.getLogger("kvrelay.router")


class _ErrorAnswer(msgspec.Struct):
    # Our nodes and newer vLLM wrap it in `error`.
    error: _ErrorAnswer | None = None
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Refused(KvrelayError):
    """A node's 4xx or KvNotLoaded, which the client sees unchanged; no fault of the node."""

    def __init__(
        self, status: int, error: ErrorBody, retry_after_s: int | None, kv_error: str = ""
    ) -> None:
        super().__init__(error.message, param=error.param)
        self.status, self.retry_after_s, self.kv_error = status, retry_after_s, kv_error
        self._error = error

    def body(self) -> ErrorBody:
        return self._error


class AttemptFailed(NodeFailed):
    """A request that a node broke: no connection, a 5xx, or a cut stream."""

    reading = False
    """The node failed while reading the request; another will show whose fault that is."""
    draining = False
    """The node takes no new requests, and is not to blame."""

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
        """`detail` goes to the log only: it may name addresses.

        `lost`: the process or its engine seems gone. `reached`: it may have had the request.
        """
        super().__init__(message)
        self.lost, self.reached = lost, reached
        self.status, self.retry_after_s, self.detail = status, retry_after_s, detail or message


def deliver_last(frame: Frame, on_frame: OnFrame) -> FrameKind:
    """Deliver a request's last frame, and return its kind.

    Raises Refused, AttemptFailed for an error or a malformed hand-over.
    """
    if frame.kind is FrameKind.ERROR:
        error = frame.error or ErrorBody("the node gave no reason", NodeFailed.type)
        retry_after_s = (frame.load or Load()).retry_after_s if frame.status in (429, 503) else None
        if 400 <= frame.status < 500 or error.code == KvNotLoaded.code:
            raise Refused(frame.status, error, retry_after_s, frame.kv_error)
        raise AttemptFailed(
            error.message,
            max(frame.status, 500),
            retry_after_s,
            lost=error.code == EngineDead.code,
        )
    if frame.kind is FrameKind.HANDOVER and frame.params is None:
        raise AttemptFailed("the node sent a hand-over without its parameters")
    on_frame(frame)
    return frame.kind


def error_of_status(
    status: int, error: ErrorBody | None, retry_after_s: int | None
) -> KvrelayError:
    """Return the error that a status other than 200 means."""
    error = error or ErrorBody(f"a node answered {status} without a reason", NodeFailed.type)
    if status in (401, 403):
        # The nodes' key is the operator's mistake.
        _log.error(
            "a node refused the router's key; give the router the nodes' key as node_api_key"
        )
        wrong_key = ErrorBody("a node refused the router's key", NodeFailed.type)
        return Refused(NodeFailed.status, wrong_key, None)
    if 400 <= status < 500:
        return Refused(status, error, retry_after_s)
    failed = AttemptFailed(error.message, max(status, 500), retry_after_s, reached=False)
    failed.draining, failed.lost = error.code == Draining.code, error.code == EngineDead.code
    failed.reading = error.code == RequestBroke.code
    return failed


def parse_message(body: bytes) -> str:
    return _parsed(body).message or "no message"


def parse_error(body: bytes, status: int = 500) -> tuple[ErrorBody, int]:
    """Return the error in an answer, and its status: `status` unless the body names one."""
    parsed = _parsed(body)
    own = parsed.code if isinstance(parsed.code, int) and 400 <= parsed.code < 600 else status
    message = parsed.message or f"a node answered {status} without a reason"
    error = ErrorBody(message, parsed.type or NodeFailed.type, parsed.param, parsed.code)
    return error, own


def _parsed(body: bytes) -> _ErrorAnswer:
    try:
        answer = msgspec.json.decode(body, type=_ErrorAnswer)
    except MALFORMED:
        return _ErrorAnswer()
    return answer.error or answer
