"""Other dialects and tokenization on a node that clients ask without a router."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import cast

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from kvrelay.node.admin_routes import read_admin_body
from kvrelay.node.completions import complete
from kvrelay.node.http_edge import authorize
from kvrelay.node.lifecycle import Node
from kvrelay.node.preprocess import detokenize, tokenize
from kvrelay.openai_api.dialects.base import Dialect, Translate
from kvrelay.openai_api.dialects.responses import Recall, translate_body
from kvrelay.openai_api.json_body import check_shape, off_loop, unless_disconnected
from kvrelay.wire.errors import EngineDead, ErrorBody, NodeFailed, RequestError

__all__ = ["DialectServer"]


class _ErrorAnswer(msgspec.Struct):
    error: ErrorBody


class DialectServer:
    """A node as a Server of openai_api/routes.py."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def check_key(self, request: Request) -> None:
        authorize(self._node.config.api_key, request)

    def owner(self, request: Request) -> str:
        return ""  # a node has one key, so all responses have one owner

    def alive(self) -> bool:
        return self._node.alive()

    def healthy(self) -> bool:
        with contextlib.suppress(EngineDead):
            self._node.ready()
            return True
        return False

    def served(self) -> list[str]:
        with contextlib.suppress(EngineDead):
            serving = self._node.ready()
            return [serving.model_name, *serving.adapters]
        return []

    async def complete(
        self, request: Request, translate: Translate, recall: Recall | None = None
    ) -> Response:
        self._node.ready()
        body = await read_admin_body(self._node, request)
        await off_loop(len(body), check_shape, body)
        body, dialect = await translate_body(
            body, translate, recall, self._node.config.max_body_bytes
        )
        try:
            answer = await complete(self._node, request, chat=dialect.chat, body=body)
        except RequestError as why:  # of a field by its name in a completion
            return Response(
                dialect.error(why.status, why.body()), why.status, media_type="application/json"
            )
        return _translate(answer, dialect)

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        serving = self._node.ready()
        body = await read_admin_body(self._node, request)
        await off_loop(len(body), check_shape, body)
        body = await off_loop(len(body), translate, body)
        if path == "/tokenize":
            return await unless_disconnected(request, tokenize(serving, self._node.sandbox, body))
        return await unless_disconnected(request, detokenize(serving, body))


def _translate(answer: Response, dialect: Dialect) -> Response:
    if isinstance(answer, StreamingResponse):
        chunks = cast("AsyncGenerator[bytes, None]", answer.body_iterator)
        answer.body_iterator = _events(chunks, dialect)
        return answer
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in ("content-length", "content-type")
    }
    status, body = answer.status_code, bytes(answer.body)
    try:
        if status == 200:
            body = dialect.whole(body)
        elif body:  # empty if the client has gone
            body = dialect.error(status, msgspec.json.decode(body, type=_ErrorAnswer).error)
    except NodeFailed as why:
        status, body = why.status, dialect.error(why.status, why.body())
    return Response(body, status, headers, "application/json")


async def _events(chunks: AsyncGenerator[bytes, None], dialect: Dialect) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield dialect.events(chunk)
