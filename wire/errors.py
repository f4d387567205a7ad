"""The error tree of kvrelay with HTTP statuses, and its OpenAI-shaped body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

__all__ = [
    "BodyTooLarge",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Draining",
    "EngineDead",
    "ErrorBody",
    "Forbidden",
    "Incompatible",
    "KV_CAUSES",
    "KvCorrupted",
    "KvNotLoaded",
    "KvrelayError",
    "LeaseLost",
    "NoNode",
    "NodeFailed",
    "NotFound",
    "Overloaded",
    "PeerLost",
    "PoisonRequest",
    "RateLimited",
    "RequestBroke",
    "RequestError",
    "RequestTimeout",
    "TransferError",
    "TransferTimeout",
    "Unauthorized",
    "Unavailable",
    "limit_of",
    "shortened",
    "without_frames",
]

_E = TypeVar("_E", bound=BaseException)
_MAX_MESSAGE_CHARS = 4096


def shortened(text: str, most: int) -> str:
    """Leave out the middle of a long text, which may be a stranger's."""
    left_out = len(text) - most
    half = most // 2
    return text if left_out <= 0 else f"{text[:half]} ...{left_out} characters... {text[-half:]}"


_LIMIT = re.compile(r"Expected `(\w+)` (of length )?([<>]=?) (\S+)$")
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_CHOICES = re.compile(r"Expected `str` matching regex '\^\((.*)\)\$.*'$")


def limit_of(why: str) -> str | None:
    """Return what a value must be, by msgspec's words; None if these are about no limit."""
    if found := _LIMIT.match(why):
        kind, length, sign, bound = found.groups()
        one, several = ("character", "characters") if kind == "str" else ("entry", "entries")
        limit = f"{_BOUNDS[sign]} {bound}"
        return f"have {limit} {one if bound == '1' else several}" if length else f"be {limit}"
    found = _CHOICES.match(why)
    if found is None:
        return None
    choices = found[1].replace("|", ", ")
    return f"be one of {choices}" if "," in choices else f"be {choices}"


class ErrorBody(msgspec.Struct, frozen=True):
    """An `error` object of an OpenAI error answer."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class KvrelayError(Exception):
    """A root of the tree. `message` names the value, the limit and the remedy."""

    status = 500
    type = "internal_error"
    code: str | None = None
    retry_after_s: int | None = None
    headers: Mapping[str, str] = {}

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = shortened(message, _MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.param = None if param is None else shortened(param, _MAX_MESSAGE_CHARS)
        if code is not None:
            self.code = code

    def body(self) -> ErrorBody:
        """Return the `error` object of the answer."""
        return ErrorBody(self.message, self.type, self.param, self.code)

    def json(self) -> bytes:
        return msgspec.json.encode({"error": self.body()})


class ConfigError(KvrelayError):
    """A wrong flag, config file or model folder. Ends the process before it serves."""

    exit_code = 2


class RequestError(KvrelayError):
    """A wrong request, which would fail again."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    """An API key that is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """An API key that may not do this."""

    status = 403
    type = "permission_error"


class NotFound(RequestError):
    """A model or route that does not exist."""

    status = 404
    type = "not_found_error"


class RequestTimeout(RequestError):
    """A client that sent its request too slowly."""

    status = 408


class Conflict(RequestError):
    """A request that the current state does not allow."""

    status = 409


class BodyTooLarge(RequestError):
    """A request body that is too long."""

    status = 413
    code = "body_too_large"


class Unavailable(KvrelayError):
    """A passing state: try again later."""

    status = 503
    type = "service_unavailable"
    retry_after_s = 1


class NoNode(Unavailable):
    """A role without a running node."""


class EngineDead(Unavailable):
    """An engine process that has ended or not started yet."""

    code = "engine_dead"


class Draining(Unavailable):
    """A node that takes nothing new."""

    code = "draining"


class Overloaded(Unavailable):
    """A full queue, or a node without time for a prompt."""

    status = 429
    type = "overloaded_error"


class RateLimited(Unavailable):
    """A limit of the API key."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class PoisonRequest(KvrelayError):
    """A request that killed nodes; it is refused for a while."""

    status = 503
    type = "service_unavailable"
    code = "poison_request"


class NodeFailed(KvrelayError):
    """A node that failed after the router had chosen it."""

    status = 502
    type = "node_failed"


_CAUSES = {
    "Incompatible": "the two nodes may not exchange KV",
    "PeerLost": "its prefill node is gone or was restarted",
    "LeaseLost": "its prefill node no longer held it",
    "TransferTimeout": "the transfer did not finish within its deadline",
    "KvCorrupted": "it differs from what its prefill node sent",
}
KV_CAUSES = tuple(sorted((*_CAUSES, "TransferError")))
"""Names of causes, for metrics."""


class RequestBroke(NodeFailed):
    """A node that failed while reading the request."""

    status = 500
    type = "internal_error"
    code = "request_broke"

    def __init__(self) -> None:
        super().__init__("this node failed on the request; its log says why")


class KvNotLoaded(KvrelayError):
    """A decode node whose KV did not arrive, with kv_load_failure_policy fail."""

    status = 502
    type = "kv_not_loaded"
    code = "kv_not_loaded"

    @classmethod
    def because(cls, cause: str, why: str = "") -> KvNotLoaded:
        """Return the error for a cause, the name of a TransferError.

        A TransferError's own message may name addresses, so `why` replaces it for clients.
        """
        words = why or _CAUSES.get(cause, "the transfer failed")
        return cls(
            f"the KV of this request could not be loaded: {words} ({cause}); send the request "
            f"again, or start the "
            "decode nodes with --kv-load-failure-policy recompute"
        )


class DeadlineExceeded(KvrelayError):
    """A request that did not finish within its deadline."""

    status = 504
    type = "deadline_exceeded"


class TransferError(KvrelayError):
    """A failed hand-over; the decode node computes what is missing (see KvNotLoaded)."""

    type = "transfer_error"


class Incompatible(TransferError):
    """A pair of nodes that may not exchange KV."""


class PeerLost(TransferError):
    """A peer that is gone or was restarted."""


class LeaseLost(TransferError):
    """A lease that has expired or been lost."""


class TransferTimeout(TransferError):
    """A transfer that did not finish within its deadline."""


class KvCorrupted(TransferError):
    """A block whose checksum differs from its source's."""


def without_frames(why: _E) -> _E:
    """Drop the tracebacks of an error and of its causes, and return it.

    A kept error keeps its frames, with a request's body and often itself: a circle that waits for
    the garbage collector.
    """
    behind: list[BaseException | None] = [why]
    while behind:
        each = behind.pop()
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            behind += each.__cause__, each.__context__
    return why
