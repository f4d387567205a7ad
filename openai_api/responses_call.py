"""One call of /v1/responses: joins the request, what is kept of earlier ones, and the answer that is kept in turn."""

from __future__ import annotations

from typing import Any

import msgspec

from openai_api.dialect import Dialect
from openai_api.response_store import ResponseStore, Stored
from openai_api.responses_answer import ResponsesAnswer
from openai_api.responses_request import Item, chat_body, decode_responses, own_items

__all__ = ["speak_responses", "stored_items"]

_encode = msgspec.json.Encoder().encode
_items = msgspec.json.Decoder(list[Item])


def speak_responses(body: bytes, store: ResponseStore, response_id: str, created_at: int) -> tuple[bytes, Dialect]:
    """A Speak (openai_api/dialect.py). Raises RequestError, also NotFound for an earlier response that is not kept."""
    request = decode_responses(body)
    turns: tuple[bytes, ...] = ()
    if request.previous_response_id is not None:
        turns = store.get(request.previous_response_id, "previous_response_id").turns
    own = own_items(request, response_id.removeprefix("resp_") + "i")
    items = [item for turn in turns for item in _items.decode(turn)] + own

    def keep(response: dict[str, Any]) -> None:
        if request.store is not False:
            given = _encode(own)
            answered = _encode([*own, *response["output"]])
            store.put(response_id, Stored(_encode(response), given, (*turns, answered)))

    return chat_body(request, items, body), ResponsesAnswer(request, response_id, created_at, keep)


def stored_items(stored: Stored, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """The page of a response's own input items behind the one with the id `after`."""
    items = _items.decode(stored.input)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
