"""HTTP edge of a node: callers' keys and bodies, and error answers in their dialect."""

from __future__ import annotations

import hmac
import logging
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvrelay.openai_api.headers import key_of_headers
from kvrelay.openai_api.routes import error_shape
from kvrelay.wire.errors import (
    KvrelayError,
    NotFound,
    RequestBroke,
    RequestError,
    Unauthorized,
)
from kvrelay.wire.frames import MALFORMED

__all__ = ["add_error_handlers", "authorize", "client_left", "decode_body"]

log = logging.getLogger("kvrelay.node")

T = TypeVar("T", bound=msgspec.Struct)


def authorize(key: str, request: Request) -> None:
    if key and not hmac.compare_digest(key_of_headers(request.headers.get).encode(), key.encode()):
        raise Unauthorized(
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        )


def decode_body(body: bytes, kind: type[T]) -> T:
    """Return a JSON body as a struct that msgpack can encode. Raises RequestError."""
    try:
        decoded = msgspec.json.decode(body, type=kind)
        msgspec.msgpack.encode(decoded)  # JSON has larger numbers
        return decoded
    except (*MALFORMED, OverflowError) as why:
        fields = " and ".join(
            field.encode_name for field in msgspec.structs.fields(kind) if field.required
        )
        raise RequestError(f"the body must be a JSON object with {fields}: {why}") from why


def client_left() -> Response:
    return Response(status_code=499)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(KvrelayError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)


async def _answer_error(request: Request, why: Exception) -> Response:
    assert isinstance(why, KvrelayError)
    headers = {"retry-after": str(why.retry_after_s)} if why.retry_after_s is not None else None
    path = request.url.path
    if why.status != 503:  # a node that loads says so twice a second
        log.info("%s %s refused with %d: %s", request.method, path, why.status, why.message)
    body = error_shape(path)(why.status, why.body())
    return Response(body, why.status, headers, "application/json")


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return client_left()


async def _answer_bug(request: Request, _: Exception) -> Response:
    return await _answer_error(request, RequestBroke())


async def _answer_http_error(request: Request, why: Exception) -> Response:
    assert isinstance(why, HTTPException)
    if why.status_code == 404:
        return await _answer_error(request, NotFound(f"there is no route {request.url.path} here"))
    error = RequestError(f"{request.method} {request.url.path}: {why.detail}")
    error.status = why.status_code
    answer = await _answer_error(request, error)
    answer.headers.update(why.headers or {})
    return answer
