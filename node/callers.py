"""What a node reads of its callers: key, id and body. Knows no engine."""

from __future__ import annotations

import asyncio
import hmac
import uuid

from fastapi import Request

from kvrelay.openai_api.routes import key_of_headers
from kvrelay.wire.errors import BodyTooLarge, RequestTimeout, Unauthorized

__all__ = ["authorize", "read_body", "request_id"]

READ_DEADLINE_S = 60.0


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused before it is read whole when it is too long. Raises BodyTooLarge,
    RequestTimeout.
    """
    size = int(request.headers.get("content-length") or 0)
    body = bytearray()
    if size <= limit:
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                async for chunk in request.stream():
                    body += chunk
                    size = max(size, len(body))
                    if size > limit:
                        break
        except TimeoutError as why:
            raise RequestTimeout(
                f"the request body did not arrive within {READ_DEADLINE_S:g} s"
            ) from why
    if size > limit:
        raise BodyTooLarge(f"the request body has {size} bytes or more; the limit is {limit}")
    return bytes(body)


def request_id(given: str | None) -> str:
    """The caller's own id (`x-request-id`) if it is sane, else a fresh one.

    A router adds some to the 128 characters that its clients have.
    """
    if given and len(given) <= 160 and given.isascii() and given.isprintable() and " " not in given:
        return given
    return uuid.uuid4().hex


def authorize(key: str, request: Request) -> None:
    """Raise Unauthorized unless the request carries the key, or none is wanted."""
    if key and not hmac.compare_digest(key_of_headers(request.headers.get).encode(), key.encode()):
        raise Unauthorized(
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        )
