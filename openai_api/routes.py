"""Routes of router and nodes: dialects, tokenization, responses, version, docs.

Chat and text completions have their own in router/serve.py and node/app.py.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvrelay.openai_api.dialects.anthropic import anthropic_error, count_body, translate_messages
from kvrelay.openai_api.dialects.base import Dialect, Translate, openai_error
from kvrelay.openai_api.dialects.response_store import ResponseStore
from kvrelay.openai_api.dialects.responses import translate_responses
from kvrelay.openai_api.json_body import json_response, off_loop
from kvrelay.openai_api.model_types import TokenizeResponse
from kvrelay.wire.errors import ErrorBody, KvrelayError, NotFound, RequestError
from kvrelay.wire.versions import RELEASE

__all__ = [
    "ANTHROPIC_PATH",
    "GUARDED",
    "RESPONSES_PATH",
    "Server",
    "add_routes",
    "body_excerpt",
    "error_shape",
    "http_error",
]

RESPONSES_PATH = "/v1/responses"
ANTHROPIC_PATH = "/v1/messages"
GUARDED = ("/v1", "/tokenize", "/detokenize")
"""Prefixes of paths that need the API key."""

_EXCERPT_BYTES = 2000


class Server(Protocol):
    def check_key(self, request: Request) -> None:
        """Raise Unauthorized if a key is needed."""

    def owner(self, request: Request) -> str:
        """Return the owner of responses: the key's hash, or one name for all."""

    async def complete(self, request: Request, translate: Translate) -> Response:
        """Answer a body that means a completion. Raises KvrelayError."""

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        """Return the answer of /tokenize or /detokenize, None if the client is gone. Raises
        KvrelayError.
        """

    def served(self) -> list[str]: ...

    def healthy(self) -> bool: ...

    def alive(self) -> bool:
        """Return false if only a new process can help."""


def error_shape(path: str) -> Callable[[int, ErrorBody], bytes]:
    anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return anthropic_error if anthropic else openai_error


def http_error(request: Request, why: HTTPException) -> KvrelayError:
    """Return the error for a route or method that there is not."""
    path = request.url.path
    if why.status_code == 404:
        return NotFound(f"there is no route {path} here")
    error = RequestError(f"{request.method} {path}: {why.detail}")
    error.status = why.status_code
    return error


def body_excerpt(body: bytes) -> str:
    return repr(body[:_EXCERPT_BYTES].decode("utf-8", "replace"))


def add_routes(
    app: FastAPI, server: Server, responses: ResponseStore | None = None, *, root_path: str = ""
) -> None:
    """Add the shared routes; responses are stored in memory by default."""
    _add_responses(app, server, responses or ResponseStore())
    _add_anthropic(app, server)
    _add_docs(app, server, root_path)

    async def tokenization(request: Request) -> Response:
        server.check_key(request)
        tokens = await server.tokenized(request, request.url.path, lambda body: body)
        return Response(status_code=499) if tokens is None else json_response(msgspec.Raw(tokens))

    app.post("/tokenize", response_model=None)(tokenization)
    app.post("/detokenize", response_model=None)(tokenization)

    @app.get("/version", response_model=None)
    async def get_version() -> Response:
        return json_response({"version": RELEASE})

    @app.api_route("/ping", methods=["GET", "POST"], response_model=None)
    async def ping() -> Response:
        return Response(status_code=200 if server.healthy() else 503)

    @app.get("/live", response_model=None)
    async def live() -> Response:
        return Response(status_code=200 if server.alive() else 503)


def _add_responses(app: FastAPI, server: Server, store: ResponseStore) -> None:
    @app.post(RESPONSES_PATH, response_model=None)
    async def respond(request: Request) -> Response:
        server.check_key(request)
        translate = partial(
            translate_responses,
            store=store,
            owner=server.owner(request),
            response_id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
        )
        return await server.complete(request, translate)

    # One route for both methods: the refusal of a third one names them all.
    @app.api_route(
        f"{RESPONSES_PATH}/{{response_id}}", methods=["GET", "DELETE"], response_model=None
    )
    async def response(request: Request, response_id: str) -> Response:
        server.check_key(request)
        if request.method == "DELETE":
            store.delete(server.owner(request), response_id)
            return json_response({"id": response_id, "object": "response", "deleted": True})
        if request.query_params.get("stream") in ("true", "1"):
            raise RequestError(
                "a response that is over is not streamed again; leave stream out", param="stream"
            )
        return json_response(msgspec.Raw(store.get(server.owner(request), response_id).body))


def _add_anthropic(app: FastAPI, server: Server) -> None:
    @app.post(ANTHROPIC_PATH, response_model=None)
    async def message(request: Request) -> Response:
        server.check_key(request)

        async def translate(body: bytes, _: int) -> tuple[bytes, Dialect]:
            return await off_loop(len(body), translate_messages, body, f"msg_{uuid.uuid4().hex}")

        return await server.complete(request, translate)

    @app.post(f"{ANTHROPIC_PATH}/count_tokens", response_model=None)
    async def count(request: Request) -> Response:
        server.check_key(request)
        tokens = await server.tokenized(request, "/tokenize", count_body)
        if tokens is None:
            return Response(status_code=499)
        counted = msgspec.json.decode(tokens, type=TokenizeResponse)
        return json_response({"input_tokens": counted.count})


def _add_docs(app: FastAPI, server: Server, root_path: str) -> None:
    @app.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        # Imported here, because a router starts 10 ms faster without it.
        from kvrelay.openai_api.openapi import document

        return json_response(document(app.title, RELEASE, server.served(), root_path))

    @app.get("/docs", response_model=None)
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)
