"""The answer of a chat completion as the Responses API has it: order of events, items, usage, ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvrelay.openai_api.dialects.base import KEEP_ALIVE, Dialect
from kvrelay.openai_api.dialects.response_store import ResponseStore, Stored
from kvrelay.openai_api.sse import error_event
from kvrelay.wire.errors import ErrorBody, NodeFailed, NotFound, Overloaded, Unavailable
from tests.openai_api.answers import (
    DONE,
    ROLE,
    TEXT,
    TOOLS,
    WHOLE_TOOLS,
    chunk,
    events_of,
    translated,
    usage_chunk,
    whole,
)


def ask(shelf: ResponseStore | None, response_id: str, **fields: Any) -> tuple[bytes, Dialect]:
    body = json.dumps({"model": "tiny", "input": "hi", **fields}).encode()
    return asyncio.run(translated(body, shelf, response_id))


def speak(
    shelf: ResponseStore | None = None, response_id: str = "resp_1", **fields: Any
) -> Dialect:
    """The answer's side of a request."""
    return ask(shelf, response_id, **fields)[1]


def test_a_text_has_the_events_of_the_api_in_their_order() -> None:
    events = events_of(speak(stream=True, metadata={"a": "b"}).events(TEXT))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo"]
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_10"}
    response = events[-1]["response"]
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    message = {
        "id": "msg_10",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    assert response["output"] == [message]
    assert (response["id"], response["status"], response["created_at"]) == (
        "resp_1",
        "completed",
        7,
    )
    assert response["metadata"] == {"a": "b"}
    assert response["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events = events_of(speak(stream=True).events(TOOLS))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
        ),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Let me see"}]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]] == [
        ("call_a", "weather", '{"city": "Rome"}'),
        ("call_b", "weather", '{"city": "Oslo"}'),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output


def test_a_whole_answer_is_the_response_that_its_stream_ends_with() -> None:
    told = json.loads(speak().whole(WHOLE_TOOLS))
    assert told == events_of(speak().events(TOOLS))[-1]["response"]


def test_a_stream_cut_anywhere_gives_the_same_events() -> None:
    once = speak().events(TOOLS)
    for at in range(len(TOOLS)):
        dialect = speak()
        assert dialect.events(TOOLS[:at]) + dialect.events(TOOLS[at:]) == once


def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    stream = ROLE + chunk({"content": "Hel"}) + chunk({}, "length") + usage_chunk() + DONE
    last = events_of(speak().events(stream))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    told = json.loads(speak().whole(whole({"content": "Hel"}, "length")))
    assert told == last["response"]


def test_an_answer_that_breaks_has_failed_and_nothing_follows() -> None:
    dialect = speak()
    stream = dialect.events(ROLE + chunk({"content": "Hel"}) + error_event(Overloaded("full")))
    events = events_of(stream)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "rate_limit_exceeded", "message": "full"}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert dialect.events(TEXT) == b""
    torn = events_of(speak().events(b"data: {torn\n\n"))
    assert torn[-1]["response"]["error"]["code"] == "server_error"
    with pytest.raises(NodeFailed):
        speak().whole(b"{}")


def test_an_answer_without_a_word_is_a_message_without_text() -> None:
    output = json.loads(speak().whole(whole({"content": ""})))["output"]
    assert [part["text"] for part in output[0]["content"]] == [""]


def test_log_probabilities_go_with_their_text() -> None:
    one = {"token": "Hel", "logprob": -0.5, "bytes": [72], "top_logprobs": []}
    dialect = speak(include=["message.output_text.logprobs"])
    events = events_of(
        dialect.events(
            chunk({"content": "Hel"}, logprobs={"content": [one]}) + chunk({}, "stop") + DONE
        )
    )
    (delta,) = (event for event in events if event["type"] == "response.output_text.delta")
    assert delta["logprobs"] == [one]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [one]


def test_a_long_wait_begins_the_response_and_then_keeps_it_alive() -> None:
    dialect = speak()
    assert [event["type"] for event in events_of(dialect.keep_alive())] == [
        "response.created",
        "response.in_progress",
    ]
    assert dialect.keep_alive() == KEEP_ALIVE
    assert events_of(dialect.events(TEXT))[0]["type"] == "response.output_item.added"


def test_errors_name_the_fields_of_this_api() -> None:
    error = ErrorBody("too long", "invalid_request_error", "messages", "context_length_exceeded")
    assert json.loads(speak().error(400, error))["error"]["param"] == "input"


def test_a_response_is_kept_and_can_be_gone_on_from() -> None:
    store = ResponseStore()
    speak(store, "resp_1", instructions="Be brief.").whole(WHOLE_TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": call_id, "output": "wet"}
        for call_id in ("call_a", "call_b")
    ]
    body, dialect = ask(store, "resp_2", previous_response_id="resp_1", input=outputs)
    messages = json.loads(body)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning"] == "Let me see"
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_a", "call_b"]
    dialect.events(TEXT)
    assert json.loads(store.get("me", "resp_2").body)["previous_response_id"] == "resp_1"


def test_nothing_is_kept_that_failed_or_that_the_client_does_not_want_kept() -> None:
    kept = ResponseStore()
    speak(kept, store=False).whole(WHOLE_TOOLS)
    speak(kept, "resp_2").events(ROLE + error_event(NodeFailed("it broke")))
    for name in ("resp_1", "resp_2"):
        with pytest.raises(NotFound):
            kept.get("me", name)


def stored(size: int) -> Stored:
    return Stored(b"x" * (size - size // 3), b"y" * (size // 3))


def kept(store: ResponseStore, owner: str = "me") -> list[str]:
    found = []
    for name in "abcdefgh":
        with contextlib.suppress(NotFound):
            store.get(owner, name)
            found.append(name)
    return found


def test_the_store_gives_way_in_number_and_in_bytes_to_what_is_newer_or_asked_for() -> None:
    store = ResponseStore(max_bytes=100, least_bytes=50)
    for name in "ab":
        store.put("me", name, stored(10))
    store.get("me", "a")
    store.put("me", "c", stored(10))
    assert kept(store) == ["a", "c"]
    store.put("me", "d", stored(95))
    store.put("me", "e", stored(101))
    assert kept(store) == ["d"]
    with pytest.raises(NotFound) as why:
        store.get("me", "e", "previous_response_id")
    assert (why.value.param, why.value.status) == ("previous_response_id", 404)
    store.delete("me", "d")
    assert kept(store) == []
    with pytest.raises(NotFound):
        store.delete("me", "d")


def test_a_response_is_neither_kept_nor_replaced_by_another_owner() -> None:
    store = ResponseStore(max_bytes=100, least_bytes=50)
    store.put("ann", "r", Stored(b"a"))
    with pytest.raises(NotFound):
        store.get("bob", "r")  # which keeps it no longer
    store.put("bob", "r", Stored(b"b"))
    store.put("bob", "t", Stored(b"t"))
    assert (store.get("bob", "t").body, store.get("ann", "r").body) == (b"t", b"a")


def test_an_owner_that_keeps_most_loses_its_own_first() -> None:
    store = ResponseStore(max_bytes=100, least_bytes=1)
    store.put("ann", "a", stored(10))
    store.put("bob", "a", stored(20))
    for name in "abcd":
        store.put("eve", name, stored(30))
    assert (kept(store, "ann"), kept(store, "bob"), kept(store, "eve")) == (
        ["a"],
        ["a"],
        ["c", "d"],
    )
    store.put("eve", "e", stored(95))  # no room beside the others'
    assert (kept(store, "ann"), kept(store, "bob"), kept(store, "eve")) == (["a"], ["a"], [])


def test_several_processes_share_a_file_and_one_that_breaks_loses_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "responses.sqlite"
    one, two = (ResponseStore(str(file), max_bytes=20, least_bytes=1) for _ in range(2))
    one.put("me", "a", stored(9))
    assert two.get("me", "a") == stored(9)
    two.put("me", "b", stored(9))
    one.put("me", "c", stored(9))
    assert kept(one) == kept(two) == ["b", "c"]
    with sqlite3.connect(file) as db:
        db.execute("DROP TABLE kept")
    one.put("me", "u", stored(9))
    assert "response u is not kept" in caplog.text
    with pytest.raises(Unavailable, match="cannot be used"):
        two.get("me", "b")
