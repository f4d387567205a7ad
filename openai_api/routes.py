"""Routes that the router and nodes share: dialects, tokenization, responses, version, docs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from kvrelay.openai_api.dialects.anthropic import anthropic_error, count_body, translate_messages
from kvrelay.openai_api.dialects.base import Translate, openai_error
from kvrelay.openai_api.dialects.generate import GENERATE_PATH, translate_generate
from kvrelay.openai_api.dialects.response_store import ResponseStore
from kvrelay.openai_api.dialects.responses import (
    Recall,
    StoredConversation,
    stored_items,
    translate_responses,
)
from kvrelay.openai_api.docs_page import DOCS_PAGE
from kvrelay.openai_api.json_body import off_loop
from kvrelay.openai_api.types import TokenizeResponse
from kvrelay.wire.errors import ErrorBody, RequestError

__all__ = [
    "ANTHROPIC_PATH",
    "GUARDED",
    "RESPONSES_PATH",
    "Server",
    "add_routes",
    "error_shape",
    "key_of_headers",
    "server_info",
    "body_excerpt",
    "version",
]

RESPONSES_PATH = "/v1/responses"
ANTHROPIC_PATH = "/v1/messages"
GUARDED = ("/v1", "/tokenize", "/detokenize", "/inference")
"""Beginnings of the paths that want the API key."""

_SHOWN_BYTES = 2000
_MAX_PAGE = 100  # items of a list, of the OpenAI API


class Server(Protocol):
    """Who answers: the router, or a node."""

    def check_key(self, request: Request) -> None:
        """Raise Unauthorized if a key is wanted and not given."""
        ...

    def owner(self, request: Request) -> str:
        """Return whose the responses are that a request makes: the hash of its key, or one word for
        all callers.
        """
        ...

    async def complete(
        self, request: Request, translate: Translate, recall: Recall | None = None
    ) -> Response:
        """A chat or text completion, asked for and answered in a dialect; `learn` is given the body
        before `speak` is.

        Raises KvrelayError.
        """
        ...

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        """Return what POST /tokenize or /detokenize answers to the request's body, translated.

        None if the client has gone. Raises KvrelayError.
        """
        ...

    def served(self) -> list[str]:
        """The names of the models that requests may ask for now."""
        ...

    def healthy(self) -> bool:
        """Whether requests can be served now."""
        ...

    def alive(self) -> bool:
        """Whether it may still get better by itself: false if only a new process can."""
        ...


def error_shape(path: str) -> Callable[[int, ErrorBody], bytes]:
    """How errors look on a path."""
    return (
        anthropic_error
        if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
        else openai_error
    )


def key_of_headers(headers: Callable[[str], str | None]) -> str:
    """The API key in a request's headers: a bearer token, or as Anthropic's clients send it.

    RFC 9110, 11: the name of the scheme in any case, and one space or more behind it."""
    scheme, _, token = (headers("authorization") or "").partition(" ")
    return token.lstrip(" ") if scheme.lower() == "bearer" else headers("x-api-key") or ""


def body_excerpt(body: bytes) -> str:
    """A request's body for a log line."""
    return repr(body[:_SHOWN_BYTES].decode("utf-8", "replace"))


def version() -> str:
    """Of the installed package."""
    try:
        return importlib.metadata.version("kvrelay")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def add_routes(
    app: FastAPI, server: Server, responses: ResponseStore | None = None, *, root_path: str = ""
) -> None:
    """Add them all. `responses`: where they are kept, in this process if nowhere else; `root_path`:
    a proxy's.
    """
    _add_responses(app, server, responses or ResponseStore())
    _add_anthropic(app, server)
    _add_docs(app, server, root_path)

    @app.post(GENERATE_PATH, response_model=None)
    async def generate(request: Request) -> Response:
        server.check_key(request)
        return await server.complete(request, translate_generate)

    async def tokenization(request: Request) -> Response:
        server.check_key(request)
        told = await server.tokenized(request, request.url.path, lambda body: body)
        return Response(status_code=499) if told is None else _json(told)

    app.post("/tokenize", response_model=None)(tokenization)
    app.post("/detokenize", response_model=None)(tokenization)

    @app.get("/version", response_model=None)
    async def said_version() -> Response:
        return _json(msgspec.json.encode({"version": version()}))

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
        shelf = StoredConversation(store, server.owner(request))
        translate = partial(
            translate_responses,
            store=shelf,
            response_id=f"resp_{uuid.uuid4().hex}",
            created_at=_now(),
        )
        return await server.complete(request, translate, shelf.recall)

    # One route for both methods: a refusal of a third one names them all.
    @app.api_route(
        f"{RESPONSES_PATH}/{{response_id}}", methods=["GET", "DELETE"], response_model=None
    )
    async def response(request: Request, response_id: str) -> Response:
        server.check_key(request)
        if request.method == "DELETE":
            store.delete(server.owner(request), response_id)
            return _json(
                msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})
            )
        if request.query_params.get("stream") in ("true", "1"):
            raise RequestError(
                "a response that is over is not streamed again; leave stream out", param="stream"
            )
        return _json(store.get(server.owner(request), response_id).body)

    @app.get(f"{RESPONSES_PATH}/{{response_id}}/input_items", response_model=None)
    async def input_items(request: Request, response_id: str) -> Response:
        server.check_key(request)
        asked = request.query_params
        limit, order = asked.get("limit", "20"), asked.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_PAGE):
            raise RequestError(
                f"limit must be between 1 and {_MAX_PAGE}, got {limit!r}", param="limit"
            )
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {order!r}", param="order")
        stored = store.get(server.owner(request), response_id)
        page = await off_loop(
            len(stored.input), stored_items, stored, int(limit), order, asked.get("after")
        )
        return _json(msgspec.json.encode(page))


def _add_anthropic(app: FastAPI, server: Server) -> None:
    @app.post(ANTHROPIC_PATH, response_model=None)
    async def message(request: Request) -> Response:
        server.check_key(request)
        return await server.complete(
            request, partial(translate_messages, message_id=f"msg_{uuid.uuid4().hex}")
        )

    @app.post(f"{ANTHROPIC_PATH}/count_tokens", response_model=None)
    async def count(request: Request) -> Response:
        server.check_key(request)
        told = await server.tokenized(request, "/tokenize", count_body)
        if told is None:
            return Response(status_code=499)
        counted = msgspec.json.decode(told, type=TokenizeResponse)
        return _json(msgspec.json.encode({"input_tokens": counted.count}))


def _add_docs(app: FastAPI, server: Server, root_path: str) -> None:
    """The document, with the model names that are served now, and its page, which loads nothing
    from elsewhere.
    """

    @app.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        from kvrelay.openai_api.openapi import (
            document,
        )  # here, because a router starts without it in 10 ms less

        return _json(
            msgspec.json.encode(document(app.title, version(), server.served(), root_path))
        )

    @app.get("/docs", response_model=None)
    async def docs() -> Response:
        return HTMLResponse(DOCS_PAGE)


def _now() -> int:
    return int(time.time())


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


_FORMATS = ("text", "json")
_PREFIXES = ("KVRELAY_", "VLLM_")
_SECRET = ("KEY", "SECRET", "TOKEN")
"""Variables with such a word in their names are not told."""
_PACKAGES = ("kvrelay", "torch", "triton", "transformers", "fastapi", "uvicorn")


def server_info(config: Any, config_format: str) -> dict[str, Any]:
    """Tell of a process with this configuration, a dataclass, as text or JSON. Raises RequestError.

    Fields that are left out of a configuration's repr are secrets, and left out here."""
    if config_format not in _FORMATS:
        raise RequestError(
            f"config_format must be {' or '.join(_FORMATS)}, got {config_format[:40]!r}",
            param="config_format",
        )
    return {
        "vllm_config": str(config) if config_format == "text" else _told(config),
        "vllm_env": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)
        },
        "system_env": {
            "os": platform.platform(),
            "libc_version": "-".join(platform.libc_ver()),
            "python_version": platform.python_version(),
            "cpu_count": os.cpu_count(),
            **{f"{name}_version": _version(name) for name in _PACKAGES},
        },
    }


def _told(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            each.name: _told(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.repr
        }
    return (
        [_told(item) for item in value] if isinstance(value, tuple) else msgspec.to_builtins(value)
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
