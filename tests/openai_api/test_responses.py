"""A conversation over kept responses: what it may hold, and where it is put together."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest

from kvrelay.openai_api.dialects import responses
from kvrelay.openai_api.dialects.response_store import ResponseStore, Stored
from kvrelay.openai_api.json_body import MAX_CONTAINERS
from kvrelay.openai_api.types import MAX_MESSAGES
from kvrelay.wire.errors import RequestError
from tests.openai_api.answers import translated, whole

MAX_BYTES = 16 << 20
EMPTY = {"type": "reasoning", "summary": []}
ANSWER = whole({"role": "assistant", "content": "ok"})


class Client:
    """Goes on from its last response, each time with other items."""

    def __init__(self) -> None:
        self.store = ResponseStore()
        self.turns = 0

    async def ask(
        self, items: Any, max_bytes: int = MAX_BYTES, answer: bytes = ANSWER, **fields: Any
    ) -> Any:
        """The chat completion that was asked for. Raises RequestError."""
        asked = {"model": "m", "input": items, **fields}
        if self.turns:
            asked["previous_response_id"] = f"resp_{self.turns}"
        said, dialect = await translated(
            msgspec.json.encode(asked), self.store, f"resp_{self.turns + 1}", max_bytes
        )
        dialect.whole(answer)
        self.turns += 1
        return json.loads(said)

    async def last(self) -> Stored:
        return self.store.get("me", f"resp_{self.turns}")


def never(*_: object) -> Any:
    raise AssertionError("it was read")


class Unreadable:
    decode = staticmethod(never)


async def test_a_conversation_of_too_many_items_is_refused() -> None:
    client = Client()
    half = [EMPTY] * (MAX_MESSAGES // 2 - 1) + [{"role": "user", "content": "hi"}]
    await client.ask(half)
    assert len((await client.ask(half[2:]))["messages"]) == 3
    with pytest.raises(RequestError) as why:
        await client.ask("hi")
    assert (why.value.status, why.value.param) == (400, "previous_response_id")
    assert all(
        word in why.value.message for word in (str(MAX_MESSAGES + 1), str(MAX_MESSAGES), "summary")
    )


async def test_a_conversation_of_too_many_bytes_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client()
    await client.ask(
        [EMPTY | {"note": "x" * 900}, {"role": "user", "content": "hi"}], max_bytes=2000
    )
    monkeypatch.setattr(responses, "_items", Unreadable())
    earlier = len((await client.last()).turns)
    with pytest.raises(RequestError) as why:
        await client.ask("y" * 1000, max_bytes=2000)
    assert (why.value.status, why.value.param) == (400, "previous_response_id")
    asked = len(
        msgspec.json.encode({"model": "m", "input": "y" * 1000, "previous_response_id": "resp_1"})
    )
    assert all(
        word in why.value.message
        for word in (f"{earlier + asked} bytes", "limit is 2000", "summary")
    )


async def test_a_conversation_holds_no_more_than_a_body_before_and_after_it_is_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client()
    parts = [{"type": "input_text", "text": ""}] * (MAX_CONTAINERS - 200)
    await client.ask([{"role": "user", "content": parts}])
    with monkeypatch.context() as patch:
        patch.setattr(responses, "_items", Unreadable())
        with pytest.raises(RequestError, match=r"behind previous_response_id, .* more than "):
            await client.ask([{"role": "user", "content": parts[:200]}])
    # A call is one object here, and two in a chat completion.
    client = Client()
    calls = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * (
        MAX_MESSAGES - 100
    )
    await client.ask(calls)
    schema = {"enum": [{}] * (MAX_CONTAINERS - 20000)}
    with pytest.raises(RequestError, match=r"behind previous_response_id, .* more than "):
        await client.ask("hi", tools=[{"type": "function", "name": "f", "parameters": schema}])


async def test_a_chat_completion_is_no_longer_than_a_body_may_be() -> None:
    client = Client()
    await client.ask("hi")
    asked: dict[str, Any] = {
        "items": "and?",
        "tools": [{"type": "function", "name": "f"}] * 1000,
        "store": False,
    }
    said = len(msgspec.json.encode(await client.ask(**asked)))
    client.turns = 1
    with pytest.raises(RequestError, match=f"conversation has {said} bytes .*limit is {said - 1}"):
        await client.ask(**asked, max_bytes=said - 1)


async def test_a_long_conversation_is_put_together_on_a_thread_however_short_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, threads = Client(), list[int]()
    read = responses.own_items

    def noted(request: Any) -> Any:
        threads.append(threading.get_ident())
        return read(request)

    monkeypatch.setattr(responses, "own_items", noted)
    await client.ask("hi")
    await client.ask("x" * 20_000)
    await client.ask("hi")
    assert threads[0] == threading.get_ident()
    assert threading.get_ident() not in threads[1:]
