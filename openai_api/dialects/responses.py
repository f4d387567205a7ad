"""A call of /v1/responses, from its body to the stored response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from kvrelay.openai_api.dialects.base import Dialect, Translate
from kvrelay.openai_api.dialects.response_store import ResponseStore, Stored, missing
from kvrelay.openai_api.dialects.responses_answer import ResponsesAnswer
from kvrelay.openai_api.dialects.responses_request import (
    Item,
    chat_body,
    check_count,
    decode_responses,
    own_items,
)
from kvrelay.openai_api.json_body import check_shape, off_loop
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "Recall",
    "StoredConversation",
    "translate_responses",
    "translate_body",
]

Recall = Callable[[bytes, int], Awaitable[int]]
"""From a body and the bytes allowed in all to the bytes that it continues."""
_NAMED = "previous_response_id"

_encode = msgspec.json.Encoder().encode
_items = msgspec.json.Decoder(list[Item])


class _Asked(msgspec.Struct):
    previous_response_id: str | None = None


_asked = msgspec.json.Decoder(_Asked)


class StoredConversation:
    """A view of the store for one owner."""

    def __init__(self, responses: ResponseStore | None = None, owner: str = "") -> None:
        self._responses, self._owner = responses, owner
        self._found: Stored | None = None

    async def recall(self, body: bytes, max_bytes: int) -> int:
        """Get the response that a body continues, and return its bytes.

        Raises NotFound, Unavailable, and RequestError for a long conversation.
        """
        try:
            wanted = (await off_loop(len(body), _asked.decode, body)).previous_response_id
        except MALFORMED:
            return 0  # translate_responses() reports it
        if wanted is None or self._responses is None:
            return 0
        # On a thread: several processes may use its file, and wait.
        self._found = await asyncio.to_thread(self._responses.get, self._owner, wanted, _NAMED)
        earlier = len(self._found.turns)
        _check_bytes(len(body) + earlier, max_bytes)
        return earlier

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """Return the recalled response. Raises NotFound."""
        if self._found is None:
            raise missing(response_id, param)
        return self._found

    def put(self, response_id: str, stored: Stored) -> None:
        if self._responses is not None:
            self._responses.put(self._owner, response_id, stored)


async def translate_body(
    body: bytes, translate: Translate, recall: Recall | None, max_bytes: int
) -> tuple[bytes, Dialect]:
    """Translate a body, on a thread if the conversation is long. Raises KvrelayError."""
    earlier = 0 if recall is None else await recall(body, max_bytes)
    return await off_loop(
        len(body) + earlier, partial(_joined, translate, max_bytes) if earlier else translate, body
    )


def _joined(translate: Translate, max_bytes: int, body: bytes) -> tuple[bytes, Dialect]:
    chat, dialect = translate(body)
    _check_bytes(len(chat), max_bytes)
    _check_shape(chat)
    return chat, dialect


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


def translate_responses(
    body: bytes, store: StoredConversation, response_id: str, created_at: int
) -> tuple[bytes, Dialect]:
    """Translate a body of POST /v1/responses. Raises RequestError, NotFound."""
    request = decode_responses(body)
    turns, earlier = b"", 0
    if request.previous_response_id is not None:
        found = store.get(request.previous_response_id, _NAMED)
        turns, earlier = found.turns, found.items
        check_count(request, earlier)
        _check_shape(turns + b"," + body)  # before they are read
    own = own_items(request)
    items = _items.decode(b"[%b]" % turns) + own
    answer = ResponsesAnswer(request, response_id, created_at)
    if request.store is not False:
        given = _encode(own)[1:-1]

        def keep(response: dict[str, Any]) -> None:
            output = [_said(item) for item in response["output"]]
            parts = (turns, given, _encode(output)[1:-1])
            count = earlier + len(own) + len(output)
            stored = Stored(_encode(response), b",".join(filter(None, parts)), count)
            store.put(response_id, stored)

        answer.finished = keep
    return chat_body(request, items, body), answer


def _said(item: Item) -> Item:
    # No later turn reads log-probabilities.
    if item["type"] != "message":
        return item
    return {
        **item,
        "content": [{"type": part["type"], "text": part["text"]} for part in item["content"]],
    }
