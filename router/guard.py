"""Checks before the routes: keys, size of bodies, answers to errors.

Operators' paths always want the admin key: a proxy on this machine sends strangers' requests from
loopback, and senders write Host and Origin themselves. No browser adds the key by itself, and CORS
keeps other origins' pages from sending it.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from kvrelay.openai_api.headers import headers_of, id_headers, key_of_headers
from kvrelay.openai_api.routes import (
    ANTHROPIC_PATH,
    GUARDED,
    RESPONSES_PATH,
    error_shape,
    http_error,
)
from kvrelay.router.admission.keys import Caller, owner_of
from kvrelay.router.metrics import Metrics
from kvrelay.router.relay import CLIENT_GONE, error_response
from kvrelay.router.request.job import CHAT_PATH, COMPLETIONS_PATH
from kvrelay.wire.errors import (
    KvrelayError,
    Unauthorized,
)

__all__ = [
    "OPERATED",
    "PEER_HEADER",
    "answer_error",
    "caller_of",
    "check_key",
    "check_operator",
    "peer_of",
]

OPERATED = ("/admin", "/console/state", "/reset_prefix_cache")
PEER_HEADER = "x-kvrelay-peer"
"""The sender of a request that a worker forwards to its parent."""

_PATHS = (CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, ANTHROPIC_PATH)
_WANT_KEYS = (*GUARDED, *OPERATED)
_CALLER = "kvrelay.caller"  # key of the ASGI scope

_log = logging.getLogger("kvrelay.router")


def check_key(
    scope: Scope, callers: Mapping[str, Caller], metrics: Metrics, admin_key: str
) -> None:
    """Check a request's key if its path wants one. Raises Unauthorized."""
    path = scope["path"]
    if not path.startswith(_WANT_KEYS):
        return
    given = key_of_headers(headers_of(scope).get)
    try:
        if path.startswith(OPERATED):
            check_operator(admin_key, given)
        else:
            scope[_CALLER] = owner_of(given, callers)
    except Unauthorized as why:
        metrics.refused(path if path in _PATHS else "other", why.status)
        raise


def check_operator(key: str, given: str) -> None:
    """Raise Unauthorized unless `given` is the admin key, or if there is none."""
    if not key or not hmac.compare_digest(given.encode(), key.encode()):
        raise Unauthorized(
            "the admin key is missing or wrong; send it as `Authorization: Bearer <key>`; a router "
            "that was started without KVRELAY_ADMIN_KEY keeps its admin routes and console closed"
        )


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[_CALLER]
    return caller


def peer_of(request: Request) -> str:
    # On a Unix socket a worker of this router asks, and says for whom.
    return (
        request.client.host
        if request.client is not None
        else request.headers.get(PEER_HEADER, "unknown")
    )


async def answer_error(request: Request, why: Exception) -> Response:
    path = request.url.path
    headers = id_headers(request.state.job_id) if hasattr(request.state, "job_id") else {}
    if isinstance(why, KvrelayError):
        error = why
    elif isinstance(why, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    elif isinstance(why, HTTPException):
        error = http_error(request, why)
        headers |= why.headers or {}
    else:
        _log.error("%s broke", path, exc_info=why)
        error = KvrelayError(f"the router broke on {path}; its log says how")
    return error_response(error, headers, error_shape(path))
