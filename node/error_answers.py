"""What a node answers when something is wrong, in the shape of the route's dialect."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvrelay.openai_api.routes import error_shape
from kvrelay.wire.errors import KvrelayError, NotFound, RequestBroke, RequestError

__all__ = ["answer_errors"]

log = logging.getLogger("kvrelay.node")


def answer_errors(app: FastAPI) -> None:
    """Whatever a route raises is answered."""
    app.add_exception_handler(KvrelayError, _error_answer)
    app.add_exception_handler(HTTPException, _http_error_answer)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    app.add_exception_handler(Exception, _bug_answer)


async def _error_answer(request: Request, why: Exception) -> Response:
    assert isinstance(why, KvrelayError)
    headers = {"retry-after": str(why.retry_after_s)} if why.retry_after_s is not None else None
    if why.status != 503:  # a node that loads says so twice a second
        log.info(
            "%s %s refused with %d: %s", request.method, request.url.path, why.status, why.message
        )
    body = error_shape(request.url.path)(why.status, why.body())
    return Response(body, why.status, headers, "application/json")


async def _nobody_there(_: Request, __: Exception) -> Response:
    """The client went away while it sent its body."""
    return Response(status_code=499)


async def _bug_answer(request: Request, _: Exception) -> Response:
    """A fault of ours; the server logs it with its trace."""
    return await _error_answer(request, RequestBroke())


async def _http_error_answer(request: Request, why: Exception) -> Response:
    assert isinstance(why, HTTPException)
    if why.status_code == 404:
        return await _error_answer(request, NotFound(f"there is no route {request.url.path} here"))
    error = RequestError(f"{request.method} {request.url.path}: {why.detail}")
    error.status = why.status_code
    answer = await _error_answer(request, error)
    answer.headers.update(why.headers or {})
    return answer
