"""One call of /v1/responses: joins the request, what is kept of earlier ones, and the answer that is kept in turn."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from openai_api.beside import beside
from openai_api.dialect import Dialect
from openai_api.response_store import Responses, Stored, missing
from openai_api.responses_answer import ResponsesAnswer
from openai_api.responses_request import Item, chat_body, decode_responses, own_items
from wire.frames import MALFORMED

__all__ = ["Recalled", "Shelf", "speak_responses", "stored_items"]

_encode = msgspec.json.Encoder().encode
_items = msgspec.json.Decoder(list[Item])


class _Asked(msgspec.Struct):
    previous_response_id: str | None = None


_asked = msgspec.json.Decoder(_Asked)


class Shelf(Protocol):
    """What one call needs of the responses that are kept."""

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """An earlier one. Raises NotFound."""
        ...

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep its own."""
        ...


class Recalled:
    """The Shelf of one call, for its owner. Getting an earlier response may take a while: `recall` its body's first."""

    def __init__(self, responses: Responses, owner: str) -> None:
        self._responses, self._owner = responses, owner
        self._found: Stored | None = None

    async def recall(self, body: bytes) -> None:
        """Get the response that a body goes on from, if it names one. Raises NotFound, Unavailable."""
        try:
            wanted = (await beside(len(body), _asked.decode, body)).previous_response_id
        except MALFORMED:
            return  # speak_responses() says what is wrong
        if wanted is not None:
            self._found = await self._responses.get(self._owner, wanted, "previous_response_id")

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """The one that was recalled. Raises NotFound if none was."""
        if self._found is None:
            raise missing(response_id, param)
        return self._found

    def put(self, response_id: str, stored: Stored) -> None:
        """See Responses."""
        self._responses.put(self._owner, response_id, stored)


def speak_responses(body: bytes, store: Shelf, response_id: str, created_at: int) -> tuple[bytes, Dialect]:
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
