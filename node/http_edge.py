"""HTTP edge of a node: callers' keys and bodies, and error answers in their dialect."""

from __future__ import annotations

import hmac
import logging
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvrelay.openai_api.headers import key_of_headers
from kvrelay.openai_api.routes import error_shape, http_error
from kvrelay.wire.errors import (
    KvrelayError,
    RequestBroke,
    RequestError,
    Unauthorized,
)
from kvrelay.wire.frames import MALFORMED

__all__ = ["ERRORS", "answer_error", "authorize", "client_left", "decode_body"]

log = logging.getLogger("kvrelay.node")

T = TypeVar("T", bound=msgspec.Struct)


def authorize(key: str, request: Request) -> None:
    if key and not hmac.compare_digest(key_of_headers(request.headers.get).encode(), key.encode()):
        raise Unauthorized(
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        )


def decode_body(body: bytes, kind: type[T]) -> T:
    """Return a JSON body as a struct. Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as why:
        fields = " and ".join(
            field.encode_name for field in msgspec.structs.fields(kind) if field.required
        )
        raise RequestError(f"the body must be a JSON object with {fields}: {why}") from why


def client_left() -> Response:
    return Response(status_code=499)


ERRORS = KvrelayError, HTTPException, ClientDisconnect, Exception
"""Errors that `answer_error` answers."""


async def answer_error(request: Request, why: Exception) -> Response:
    if isinstance(why, ClientDisconnect):
        return client_left()
    path, headers = request.url.path, dict[str, str]()
    if isinstance(why, HTTPException):
        headers |= why.headers or {}
        why = http_error(request, why)
    error = why if isinstance(why, KvrelayError) else RequestBroke()
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status != 503:  # a node that loads says so twice a second
        log.info("%s %s refused with %d: %s", request.method, path, error.status, error.message)
    body = error_shape(path)(error.status, error.body())
    return Response(body, error.status, headers, "application/json")
