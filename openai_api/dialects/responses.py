"""A call of /v1/responses, from its body to the stored response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from kvrelay.openai_api.dialects.base import Dialect
from kvrelay.openai_api.dialects.response_store import ResponseStore, Stored
from kvrelay.openai_api.dialects.responses_answer import ResponsesAnswer
from kvrelay.openai_api.dialects.responses_request import (
    Item,
    ResponsesRequest,
    chat_body,
    check_count,
    decode_responses,
    own_items,
)
from kvrelay.openai_api.json_body import check_shape, off_loop
from kvrelay.wire.errors import RequestError
from kvrelay.wire.json_object import JsonObject

__all__ = ["translate_responses"]

_NAMED = "previous_response_id"

_encode = msgspec.json.Encoder().encode
_items = msgspec.json.Decoder(list[Item])


async def translate_responses(
    body: bytes,
    max_bytes: int,
    *,
    store: ResponseStore,
    owner: str,
    response_id: str,
    created_at: int,
) -> tuple[bytes, Dialect]:
    """Translate a body of POST /v1/responses, with the conversation that it continues.

    `max_bytes` limits both together. Raises RequestError, NotFound, Unavailable.
    """
    request, earlier = await off_loop(len(body), decode_responses, body), Stored()
    if request.previous_response_id is not None:
        # On a thread: several processes may use its file, and wait.
        asked = owner, request.previous_response_id, _NAMED
        earlier = await asyncio.to_thread(store.get, *asked)
        _check_bytes(len(body) + len(earlier.turns), max_bytes)
    answer = ResponsesAnswer(request, response_id, created_at)
    keep = partial(store.put, owner, response_id) if request.store is not False else None
    size = len(body) + len(earlier.turns)
    chat = await off_loop(size, _chat, request, body, earlier.turns, max_bytes, answer, keep)
    return chat, answer


def _chat(
    request: ResponsesRequest,
    body: bytes,
    turns: bytes,
    max_bytes: int,
    answer: ResponsesAnswer,
    keep: Callable[[Stored], None] | None,
) -> bytes:
    if turns:
        _check_shape(turns + b"," + body)  # before they are read
    own = own_items(request)
    items = [*_items.decode(b"[%b]" % turns), *own]
    check_count(len(items))
    chat = chat_body(request, items, body)
    if turns:
        _check_bytes(len(chat), max_bytes)
        _check_shape(chat)
    if keep is not None:
        given = _encode(own)[1:-1]

        def finished(response: JsonObject) -> None:
            parts = turns, given, _encode([_said(item) for item in response["output"]])[1:-1]
            keep(Stored(_encode(response), b",".join(filter(None, parts))))

        answer.finished = finished
    return chat


def _check_bytes(count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(
            f"the conversation has {count} bytes with those before this request; the limit is "
            f"{limit}; begin a new one without {_NAMED}, with a summary of this one",
            param=_NAMED,
        )


def _check_shape(whole: bytes) -> None:
    try:
        check_shape(whole)
    except RequestError as why:
        raise RequestError(
            f"with the conversation behind {_NAMED}, {why.message}", param=_NAMED
        ) from why


def _said(item: Item) -> Item:
    # No later turn reads log-probabilities.
    if item["type"] != "message":
        return item
    texts = [{"type": part["type"], "text": part["text"]} for part in item["content"]]
    return {**item, "content": texts}
