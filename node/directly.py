"""What a node answers to clients that ask it without a router: other dialects, tokenization.

The routes are openai_api/routes.py's; chat completions themselves are node/app.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import cast

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from kvrelay.node.preprocess import detokenized, tokenized
from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Serving
from kvrelay.openai_api.dialects.base import Dialect, Translate
from kvrelay.openai_api.dialects.responses import Recall, translate_body
from kvrelay.openai_api.json_body import check_shape, off_loop, unless_disconnected
from kvrelay.wire.errors import EngineDead, ErrorBody, NodeFailed, RequestError

__all__ = ["Directly"]


class _Refusal(msgspec.Struct):
    error: ErrorBody


class Directly:
    """The Server of openai_api/routes.py on a node.

    `ready` is the serving half or raises EngineDead, `alive` whether it may still get so, `read` a
    request's checked body, `check` looks at its key only, and `answer` answers a completion, of a
    chat or not, in its own bytes.
    """

    def __init__(
        self,
        ready: Callable[[], Serving],
        alive: Callable[[], bool],
        sandbox: Sandbox,
        check: Callable[[Request], None],
        read: Callable[[Request], Awaitable[bytes]],
        answer: Callable[[Request, bytes, bool], Awaitable[Response]],
        max_body_bytes: int,
    ) -> None:
        self._ready, self._sandbox, self._check, self._read, self._answer = (
            ready,
            sandbox,
            check,
            read,
            answer,
        )
        self._max_bytes = max_body_bytes
        self.alive = alive

    def check_key(self, request: Request) -> None:
        """Raise Unauthorized if a key is wanted and not given."""
        self._check(request)

    def owner(self, request: Request) -> str:
        """Of all responses one: a node has one key."""
        return ""

    def healthy(self) -> bool:
        """Whether requests can be served now."""
        with contextlib.suppress(EngineDead):
            self._ready()
            return True
        return False

    def served(self) -> list[str]:
        """The names of the model and of its adapters, once it is loaded."""
        with contextlib.suppress(EngineDead):
            serving = self._ready()
            return [serving.model_name, *serving.adapters]
        return []

    async def complete(
        self, request: Request, translate: Translate, recall: Recall | None = None
    ) -> Response:
        """A completion in a dialect. Raises KvrelayError."""
        self._ready()
        body = await self._read(request)
        await off_loop(len(body), check_shape, body)
        body, dialect = await translate_body(body, translate, recall, self._max_bytes)
        try:
            return _spoken(await self._answer(request, body, dialect.chat), dialect)
        except RequestError as why:  # of a field by its name in a completion
            return Response(
                dialect.error(why.status, why.body()), why.status, media_type="application/json"
            )

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        """POST /tokenize and /detokenize; None if the client has gone. Raises KvrelayError."""
        serving = self._ready()
        body = await self._read(request)
        await off_loop(len(body), check_shape, body)
        body = await off_loop(len(body), translate, body)
        work = (
            tokenized(serving, self._sandbox, body)
            if path == "/tokenize"
            else detokenized(serving, body)
        )
        return await unless_disconnected(request, work)


def _spoken(answer: Response, dialect: Dialect) -> Response:
    """The answer to a completion in the client's dialect."""
    if isinstance(answer, StreamingResponse):
        answer.body_iterator = _events(
            cast("AsyncGenerator[bytes, None]", answer.body_iterator), dialect
        )
        return answer
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in ("content-length", "content-type")
    }
    status, body = answer.status_code, bytes(answer.body)
    try:
        body = dialect.whole(body) if status == 200 else _refusal(status, body, dialect)
    except NodeFailed as why:
        status, body = why.status, dialect.error(why.status, why.body())
    return Response(body, status, headers, "application/json")


def _refusal(status: int, body: bytes, dialect: Dialect) -> bytes:
    """An error's body; one without any is for nobody: the client has gone."""
    return dialect.error(status, msgspec.json.decode(body, type=_Refusal).error) if body else body


async def _events(chunks: AsyncGenerator[bytes, None], dialect: Dialect) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield dialect.events(chunk)
