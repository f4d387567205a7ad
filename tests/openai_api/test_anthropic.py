"""The Anthropic API's messages: the chat completion that a request means, and the answer in that
API's events.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvrelay.openai_api.dialects.anthropic import anthropic_error, count_body, translate_messages
from kvrelay.openai_api.dialects.base import KEEP_ALIVE, Dialect
from kvrelay.openai_api.sse import error_event
from kvrelay.wire.errors import ErrorBody, NodeFailed, Overloaded, RequestError
from tests.openai_api.answers import (
    DONE,
    ROLE,
    TEXT,
    TOOLS,
    USAGE,
    WHOLE_TOOLS,
    call,
    chunk,
    events_of,
    translated,
    whole,
)

MARKED: dict[str, Any] = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
ASKED = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def spoken(**fields: Any) -> tuple[dict[str, Any], Dialect]:
    """The chat body of a request, and the answer's side."""
    body, dialect = translate_messages(json.dumps(ASKED | fields).encode(), "msg_1")
    return json.loads(body), dialect


def test_a_request_has_its_fields_under_their_chat_names() -> None:
    schema = {"type": "object"}
    chat, _ = spoken(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        stream=True,
        temperature=0,
        top_p=0.5,
        top_k=4,
        seed=3,
        metadata={"user_id": "me"},
        thinking={"type": "disabled"},
        tools=[{"name": "weather", "description": "Of a city.", "input_schema": schema}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
    )
    assert chat == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "fit_max_tokens": True,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "seed": 3,
        "user": "me",
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "Of a city.", "parameters": schema},
            }
        ],
        "tool_choice": "required",
        "cache_control": {"type": "ephemeral", "ttl": "5m"},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema},
        },
        "reasoning_effort": "low",
    }


def test_blocks_become_turns_with_their_calls_and_results() -> None:
    chat, _ = spoken(
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "Rome?"}, {"type": "text", "text": "Oslo?"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "content": [{"type": "text", "text": "wet"}],
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ]
    )
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for call_id, arguments in (("a", '{"city":"Rome"}'), ("b", "{}"))
    ]
    assert chat["messages"] == [
        {"role": "user", "content": "Rome?\nOslo?"},
        {"role": "assistant", "content": "Looking.", "reasoning": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": "wet"},
        {"role": "user", "content": "And?"},
    ]
    assert "continue_final_message" not in chat


def test_an_answer_that_the_client_has_begun_is_gone_on_with() -> None:
    chat, _ = spoken(messages=[*ASKED["messages"], {"role": "assistant", "content": "Once"}])  # type: ignore[misc]
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)


def test_what_is_counted_is_the_prompt_alone() -> None:
    asked = ASKED | {"system": "Be brief.", "stream": True}
    assert json.loads(count_body(json.dumps(asked).encode())) == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 16385}, "messages"),
        ({"tools": [{}] * 1025}, "tools"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "9999h"}}, "cache_control.ttl"),
        ({"system": [MARKED | {"cache_control": "yes"}]}, "system[0].cache_control"),
        ({"tools": [{"name": "f", "cache_control": {}}]}, "tools[0].cache_control.type"),
        (
            {"messages": [{"role": "user", "content": [MARKED] * 1000}], "system": [MARKED]},
            "messages[0].content[999].cache_control",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as why:
        spoken(**fields)
    assert why.value.param == param


def test_the_longest_of_four_markers_counts_and_usage_tells_what_they_have_written() -> None:
    hour = MARKED | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    turn = {"role": "user", "content": [MARKED, hour, {"type": "text", "text": "y"}]}
    chat, dialect = spoken(messages=[turn], system=[MARKED])
    assert chat["cache_control"] == hour["cache_control"]
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 4}}
    answer = whole({"content": "x"}).replace(json.dumps(USAGE).encode(), json.dumps(usage).encode())
    assert json.loads(dialect.whole(answer))["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 4,
        "cache_read_input_tokens": 3,
        "output_tokens": 4,
    }


def usage_first(stream: bytes) -> bytes:
    """The stream with usage in its first chunk too, as continuous_usage_stats has it."""
    return stream.replace(
        b'"choices": [', b'"usage": %b, "choices": [' % json.dumps(USAGE).encode(), 1
    )


def test_a_text_has_the_events_of_the_api_in_their_order() -> None:
    events = events_of(spoken(stream=True)[1].events(usage_first(TEXT)))
    usage = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 4,
    }
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    assert events == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]


def test_thinking_text_and_calls_are_blocks_of_their_own_one_after_the_other() -> None:
    events = events_of(spoken(stream=True)[1].events(TOOLS))
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert blocks == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "weather", "input": {}},
    ]
    assert [event["index"] for event in events[1:-2]] == [0] * 4 + [1] * 3 + [2] * 4 + [3] * 3
    pieces = [event.get("delta", {}).get("partial_json") for event in events]
    assert list(filter(None, pieces)) == ['{"city": ', '"Rome"}', '{"city": "Oslo"}']
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_whole_answer_holds_the_blocks_of_its_stream() -> None:
    told = json.loads(spoken()[1].whole(WHOLE_TOOLS))
    assert told["content"] == [
        {"type": "thinking", "thinking": "Let me see", "signature": ""},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_b", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert (told["stop_reason"], told["type"], told["role"]) == ("tool_use", "message", "assistant")


@pytest.mark.parametrize(
    ("finish", "stop_reason", "max_tokens", "said"),
    [
        ("stop", None, 9, ("end_turn", None)),
        ("stop", "END", 9, ("stop_sequence", "END")),
        ("stop", 7, 9, ("end_turn", None)),
        ("length", None, 4, ("max_tokens", None)),
        ("length", None, 9, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_of_the_end_is_told(
    finish: str, stop_reason: int | str | None, max_tokens: int, said: tuple[str, str | None]
) -> None:
    dialect = spoken(stop_sequences=["END"], max_tokens=max_tokens)[1]
    told = json.loads(dialect.whole(whole({"content": "x"}, finish, stop_reason=stop_reason)))
    assert (told["stop_reason"], told["stop_sequence"]) == said


def test_a_call_that_was_cut_keeps_what_there_is_of_its_arguments() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"city": "Ro'}}
    told = json.loads(
        spoken(max_tokens=4)[1].whole(whole({"content": None, "tool_calls": [call]}, "length"))
    )
    assert told["content"][0]["input"] == {"incomplete_json": '{"city": "Ro'}
    assert told["stop_reason"] == "max_tokens"


def test_an_answer_that_breaks_ends_with_an_error_event_and_nothing_follows() -> None:
    dialect = spoken(stream=True)[1]
    broken = ROLE + chunk({"content": "Hel"}) + error_event(Overloaded("full"))
    events = events_of(dialect.events(broken + chunk({"content": "lo"}) + b"data: {\n\n"))
    assert events[-1] == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
    assert dialect.events(TEXT) == b""
    messages = spoken(stream=True)[1]
    _, responses = asyncio.run(translated(b'{"model": "m", "input": "hi"}'))
    for ended, last in ((messages, "message_stop"), (responses, "response.completed")):
        assert events_of(ended.events(TEXT + broken))[-1]["type"] == last
    with pytest.raises(NodeFailed):
        spoken()[1].whole(b"[]")


@pytest.mark.parametrize("between", [{"content": "a"}, {"tool_calls": [call(1, "{}", "b", "f")]}])
def test_a_call_that_goes_on_after_its_end_breaks_the_answer(between: dict[str, Any]) -> None:
    first = chunk({"tool_calls": [call(0, '{"a":', "a", "f")]}) + chunk(between)
    more = chunk({"tool_calls": [call(0, "1}")]})
    messages = events_of(spoken(stream=True)[1].events(first + more))
    assert messages[-1]["type"] == "error"
    _, responses = asyncio.run(translated(b'{"model": "m", "input": "hi"}'))
    assert events_of(responses.events(first + more))[-1]["type"] == "response.failed"


def test_pings_keep_a_message_alive_once_it_has_begun() -> None:
    dialect = spoken(stream=True)[1]
    assert dialect.keep_alive() == KEEP_ALIVE
    dialect.events(ROLE)
    assert events_of(dialect.keep_alive()) == [{"type": "ping"}]
    assert events_of(dialect.events(DONE))[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_the_types_of_the_api(status: int, kind: str) -> None:
    told = json.loads(anthropic_error(status, ErrorBody("no", "whatever", "field")))
    assert told == {"type": "error", "error": {"type": kind, "message": "no"}}
