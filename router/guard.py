"""The guard of the routes: who may pass, how much of a body is read, and OpenAI-shaped answers to all that may not."""

from __future__ import annotations

import asyncio
import logging

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from openai_api.routes import ANTHROPIC_PATH, GUARDED, RESPONSES_PATH, error_shape, given_key
from openai_api.token_generation import GENERATE_PATH
from router.admission.keys import Caller, Keyring
from router.client import arrived, headers_of
from router.metrics import Metrics
from router.operators import OPERATED, check_operator
from router.relay import error_response, id_headers
from router.walk.job import CHAT_PATH, COMPLETIONS_PATH
from wire.errors import BodyTooLarge, KvrelayError, NotFound, RequestError, RequestTimeout, Unauthorized

__all__ = ["KeyGate", "add_error_answers", "answer_any", "caller_of", "read_body"]

_PATHS = (CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, ANTHROPIC_PATH, GENERATE_PATH)
_WANT_KEYS = (*GUARDED, *OPERATED)
_CALLER = "kvrelay.caller"  # key of the ASGI scope

_log = logging.getLogger("kvrelay.router")


class KeyGate:
    """Lets only requests with a known API key through to the guarded paths, with the admin key to the operators'."""

    def __init__(self, app: ASGIApp, keyring: Keyring, metrics: Metrics, admin_key: str) -> None:
        self._app = app
        self._metrics = metrics
        self._keyring = keyring
        self._admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_WANT_KEYS):
            given = given_key(headers_of(scope).get)
            try:
                if scope["path"].startswith(OPERATED):
                    check_operator(self._admin_key, given)
                else:
                    scope[_CALLER] = self._keyring.caller(given)
            except Unauthorized as error:
                self._metrics.refused(scope["path"] if scope["path"] in _PATHS else "other", error.status)
                await error_response(error, shape=error_shape(scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Whose key a request has brought; KeyGate has let it pass."""
    caller: Caller = request.scope[_CALLER]
    return caller


async def read_body(request: Request, limit_bytes: int, deadline_s: float) -> bytes:
    """The request body. Raises BodyTooLarge as soon as it is known to be, before it is held in memory."""

    def too_large() -> BodyTooLarge:
        return BodyTooLarge(f"the request body is longer than {limit_bytes} bytes; send less")

    announced = headers_of(request.scope).get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced) > limit_bytes:
        raise too_large()
    whole = arrived(request.scope)  # mostly it has, with the headers: no need to wait then
    if whole is not None:
        if len(whole) > limit_bytes:
            raise too_large()
        return whole
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise too_large()
    except TimeoutError as why:
        raise RequestTimeout(f"the request body did not arrive within {deadline_s:g} s; send it faster") from why
    return bytes(body)


def add_error_answers(app: FastAPI) -> None:
    """Whatever a route raises is answered in the shape of its API."""
    app.add_exception_handler(KvrelayError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_crash)


async def _answer_error(request: Request, why: Exception) -> Response:
    assert isinstance(why, KvrelayError)
    headers = id_headers(request.state.job_id) if hasattr(request.state, "job_id") else None
    return error_response(why, headers, error_shape(request.url.path))


async def _answer_http_error(request: Request, why: Exception) -> Response:
    assert isinstance(why, HTTPException)
    shape = error_shape(request.url.path)
    if why.status_code == 404:
        return error_response(NotFound(f"there is no route {request.url.path}"), shape=shape)
    error = RequestError(f"{request.method} {request.url.path}: {why.detail}")
    error.status = why.status_code
    return error_response(error, why.headers, shape)


async def answer_any(request: Request, why: Exception) -> Response:
    """The answer to whatever a route raised that FastAPI does not know of."""
    if isinstance(why, KvrelayError):
        return await _answer_error(request, why)
    _log.error("%s broke", request.url.path, exc_info=why)
    return await _answer_crash(request, why)


async def _answer_crash(request: Request, why: Exception) -> Response:
    error = KvrelayError(f"the router broke on {request.url.path}; its log says how")
    return error_response(error, shape=error_shape(request.url.path))
