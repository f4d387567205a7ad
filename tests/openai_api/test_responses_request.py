"""A request to /v1/responses is the chat completion that it means, or is refused with a sentence."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from kvrelay.openai_api.types import MAX_MESSAGES
from kvrelay.wire.errors import RequestError
from tests.openai_api.answers import translated


def chat_of(**fields: Any) -> dict[str, Any]:
    """The chat body of a request."""
    asked = json.dumps({"model": "tiny", "input": "hi", **fields}).encode()
    value: dict[str, Any] = json.loads(asyncio.run(translated(asked))[0])
    return value


def test_a_text_with_instructions_is_a_system_and_a_user_message() -> None:
    assert chat_of(
        instructions="Be brief.", temperature=0, max_output_tokens=5, top_p=0.5, user="me"
    ) == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "user": "me",
    }


def test_items_become_turns_with_their_calls_and_reasoning() -> None:
    messages = chat_of(
        instructions="One.",
        input=[
            {"role": "developer", "content": "Two."},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Rome?"}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm"}],
            },
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "[]"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "wet"}],
            },
        ],
    )["messages"]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for call_id, arguments in (("a", "{}"), ("b", "[]"))
    ]
    assert messages == [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "Looking.", "reasoning": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": "wet"},
    ]


def test_tools_formats_and_streams_have_their_chat_fields() -> None:
    schema = {"type": "object", "properties": {}}
    weather = {"type": "function", "name": "weather", "parameters": schema, "strict": True}
    chat = chat_of(
        tools=[weather, {"type": "function", "name": "time"}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={
            "format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
        },
        stream=True,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "low"},
        seed=3,
        ignore_eos=True,
    )
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}},
        {"type": "function", "function": {"name": "time"}},
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert chat["parallel_tool_calls"] is False
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    assert (chat["stream"], chat["stream_options"]) == (True, {"include_usage": True})
    assert (chat["logprobs"], chat["top_logprobs"], chat["reasoning_effort"]) == (True, 2, "low")
    assert (chat["seed"], chat["ignore_eos"]) == (3, True)
    assert chat_of(text={"format": {"type": "json_object"}})["response_format"] == {
        "type": "json_object"
    }


def test_many_texts_of_an_assistant_are_joined_once() -> None:
    said = [{"role": "assistant", "content": "a" * 800}] * MAX_MESSAGES
    began = time.process_time()
    (message,) = chat_of(input=said)["messages"]
    assert time.process_time() - began < 5  # each copied with all before it is 100 GB
    assert message["content"] == "\n".join(["a" * 800] * MAX_MESSAGES)


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"background": True}, "background", "stream"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{}] * 1025}, "tools", "at most 1024 entries, got 1025"),
        ({"input": [{}] * 16385}, "input", "at most 16384 entries, got 16385"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "only the tools"),
        ({"input": ""}, "input", "at least 1"),
        ({"input": [{}]}, "input[0]", "type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content",
            "text only",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "item_reference"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
            "input[0].arguments",
            "missing",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "yaml"),
        ({"previous_response_id": "resp_0"}, "previous_response_id", "not kept"),
    ],
)
def test_what_is_not_served_is_refused_with_its_field(
    fields: dict[str, Any], param: str, word: str
) -> None:
    with pytest.raises(RequestError) as why:
        chat_of(**fields)
    assert why.value.param is not None
    assert why.value.param.startswith(param)
    assert word in why.value.message
    assert 400 <= why.value.status <= 404
