"""A chat's text into its message: the parsers together, as deltas and as a whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.openai_api.message_stream import MessageForm, MessageStream
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.wire.errors import RequestError
from tests.openai_api.answers import formed as form
from tests.openai_api.answers import with_markers

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "é"}}\n</tool_call>'


def told(stream: MessageStream, pieces: list[str]) -> dict[str, Any]:
    for piece in pieces:
        stream.push(piece)
    stream.finish()
    message: dict[str, Any] = msgspec.to_builtins(stream.message())
    return message


def stream(form: MessageForm, choice: int = 0) -> MessageStream:
    return MessageStream(form, "chatcmpl-1", choice)


def names(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]


def test_a_message_of_calls_alone_has_no_content(bytewise: Tokenizer) -> None:
    message = told(stream(form(bytewise, tools=[WEATHER])), [CALL])
    assert message["content"] is None
    assert told(stream(form(bytewise, tools=[WEATHER])), []) == {
        "role": "assistant",
        "content": "",
        "reasoning": None,
    }


def test_required_and_named_calls(bytewise: Tokenizer) -> None:
    required = stream(form(bytewise, tool="", tools=[WEATHER, NOW], tool_choice="required"))
    assert names(told(required, ['[{"name": "now", "parameters": {}}]'])) == [("now", "{}")]
    assert required.finish_reason("stop") == "tool_calls"
    choice = {"type": "function", "function": {"name": "now"}}
    named = stream(form(bytewise, tool="", tools=[WEATHER, NOW], tool_choice=choice))
    message = told(named, list('{"a": 1}'))
    assert names(message) == [("now", '{"a": 1}')]
    assert message["content"] is None
    assert named.finish_reason("stop") == "stop"


def test_without_parallel_calls_the_first_one_counts(bytewise: Tokenizer) -> None:
    message = told(
        stream(form(bytewise, tools=[WEATHER], parallel_tool_calls=False)), [f"{CALL}\n{CALL}"]
    )
    assert names(message) == [("weather", '{"city": "é"}')]


def test_auto_without_a_parser_names_the_flag(bytewise: Tokenizer) -> None:
    with pytest.raises(RequestError, match="--tool-call-parser none") as refused:
        form(bytewise, tool="", tools=[WEATHER])
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


def test_ids_differ_by_choice_and_are_those_that_mistrals_models_want(bytewise: Tokenizer) -> None:
    auto = form(bytewise, tools=[WEATHER])
    calls = [told(stream(auto, choice), [CALL, CALL])["tool_calls"] for choice in (0, 1, 0)]
    ids = [call["id"] for each in calls for call in each]
    assert ids[:2] == ids[4:]
    assert len(set(ids)) == 4
    choice = {"type": "function", "function": {"name": "now"}}
    for fields in ({}, {"tool_choice": choice}):
        mistral = form(bytewise, tool="mistral", tools=[WEATHER, NOW], **fields)
        assert len(told(stream(mistral), ["[TOOL_CALLS]now{}"])["tool_calls"][0]["id"]) == 9


def test_white_space_behind_a_call_is_no_content_whatever_was_thought(bytewise: Tokenizer) -> None:
    both = form(bytewise, "<think>", reasoning="qwen3", tools=[WEATHER])
    message = told(stream(both), [f"a</think>{CALL}\nb"])
    assert (message["reasoning"], message["content"]) == ("a", "b")


def test_reasoning_that_is_not_wanted_is_left_out(bytewise: Tokenizer) -> None:
    quiet = form(bytewise, "<think>", reasoning="qwen3", include_reasoning=False)
    assert told(stream(quiet), ["a</think>b"]) == {
        "role": "assistant",
        "content": "b",
        "reasoning": None,
    }


def test_markers_that_are_special_tokens_are_rendered_and_hidden() -> None:
    special = ("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "<|end|>")
    tokenizer = with_markers(special, ["</tool_call>"])
    auto = form(tokenizer, "<think>", reasoning="qwen3", tools=[WEATHER])
    assert set(auto.hidden.values()) == {"<think>", "</think>", "<tool_call>"}
    assert stream(auto).rendered == {
        tokenizer.special_id(marker) for marker in auto.hidden.values()
    }
    # Wherever one stands, the client never sees it.
    message = told(stream(auto), list(f"a<tool_call>b</think>c<think>d<tool_call>e{CALL}f</think>"))
    assert (message["reasoning_content"], message["content"]) == ("ab", "cdef")
    # Who asks for special tokens gets them.
    shown = form(tokenizer, tools=[WEATHER], skip_special_tokens=False)
    assert shown.hidden == {}
    assert told(stream(shown), ["<tool_call>oops"])["content"] == "<tool_call>oops"
