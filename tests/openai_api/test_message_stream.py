"""A chat's text into its message: the parsers together, as deltas and as a whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvrelay.openai_api.body import decode_chat
from kvrelay.openai_api.message_stream import MessageForm, PlainMessage, message_form
from kvrelay.openai_api.model_formats import REASONING_FORMATS, TOOL_FORMATS
from kvrelay.openai_api.reasoning import Opening
from kvrelay.openai_api.tokenizer import BYTE_CHARS, Tokenizer, byte_level
from kvrelay.openai_api.types import Delta
from kvrelay.wire.errors import RequestError

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "é"}}\n</tool_call>'


def form(
    tokenizer: Tokenizer,
    prompt: str = "x",
    parser: str = "hermes",
    reasoning: str = "",
    **fields: Any,
) -> MessageForm:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return message_form(
        decode_chat(json.dumps(body).encode()),
        tokenizer,
        tokenizer.encode(prompt, False),
        tool_format=TOOL_FORMATS.get(parser),
        reasoning=REASONING_FORMATS.get(reasoning),
    )


def added_up(deltas: list[Delta]) -> dict[str, Any]:
    """The message as a client puts it together; of a call, id, type and name come once and first."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        assert (
            sum(each is not None for each in (delta.content, delta.reasoning, delta.tool_calls))
            == 1
        )
        assert delta.reasoning == delta.reasoning_content
        content += delta.content or ""
        reasoning += delta.reasoning or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                calls.append(
                    {"id": call.id, "type": call.type, "function": {"name": call.function.name}}
                )
                assert call.function.arguments == ""
                calls[-1]["function"]["arguments"] = ""
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    message = {
        "role": "assistant",
        "content": content if content or not (reasoning or calls) else None,
    }
    both = {"reasoning": reasoning or None} | (
        {"reasoning_content": reasoning} if reasoning else {}
    )
    return message | both | ({"tool_calls": calls} if calls else {})


def told(stream: PlainMessage, pieces: list[str]) -> dict[str, Any]:
    """What deltas add up to; the whole message must be the same."""
    deltas = [delta for piece in pieces for delta in stream.push(piece)] + stream.finish()
    message = added_up(deltas)
    assert msgspec.to_builtins(stream.message()) == message
    return message


def stream(form: MessageForm, choice: int = 0) -> PlainMessage:
    return form.parser("chatcmpl-1", choice)


def names(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]


def test_a_chat_without_tools_and_reasoning_is_plain(bytewise: Tokenizer) -> None:
    assert form(bytewise).plain
    assert form(bytewise, parser="", tools=[WEATHER], tool_choice="none").plain
    assert not form(bytewise, tools=[WEATHER]).plain
    assert not form(bytewise, reasoning="qwen3").plain


def test_auto_calls_and_its_finish_reason(bytewise: Tokenizer) -> None:
    one = stream(form(bytewise, tools=[WEATHER]))
    message = told(one, list(f"Let me see.\n{CALL}"))
    assert message["content"] == "Let me see."
    assert names(message) == [("weather", '{"city": "é"}')]
    assert message["tool_calls"][0]["type"] == "function"
    assert one.finish_reason("stop") == "tool_calls"
    assert one.finish_reason("length") == "length"
    none = stream(form(bytewise, tools=[WEATHER]))
    assert told(none, ["No need."]) == {
        "role": "assistant",
        "content": "No need.",
        "reasoning": None,
    }
    assert none.finish_reason("stop") == "stop"


def test_a_message_of_calls_alone_has_no_content(bytewise: Tokenizer) -> None:
    message = told(stream(form(bytewise, tools=[WEATHER])), [CALL])
    assert message["content"] is None
    assert told(stream(form(bytewise, tools=[WEATHER])), []) == {
        "role": "assistant",
        "content": "",
        "reasoning": None,
    }


def test_required_and_named_calls(bytewise: Tokenizer) -> None:
    required = stream(form(bytewise, parser="", tools=[WEATHER, NOW], tool_choice="required"))
    text = '[{"name": "weather", "parameters": {"city": "é"}}, {"name": "now", "parameters": {}}]'
    assert names(told(required, list(text))) == [("weather", '{"city": "é"}'), ("now", "{}")]
    assert required.finish_reason("stop") == "tool_calls"
    choice = {"type": "function", "function": {"name": "now"}}
    named = stream(form(bytewise, parser="", tools=[WEATHER, NOW], tool_choice=choice))
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
        form(bytewise, parser="", tools=[WEATHER])
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


def test_ids_differ_by_choice_and_are_those_that_mistrals_models_want(bytewise: Tokenizer) -> None:
    auto = form(bytewise, tools=[WEATHER])
    ids = [told(stream(auto, choice), [CALL])["tool_calls"][0]["id"] for choice in (0, 1, 0)]
    assert ids[0] == ids[2] != ids[1]
    choice = {"type": "function", "function": {"name": "now"}}
    for fields in ({}, {"tool_choice": choice}):
        mistral = form(bytewise, parser="mistral", tools=[WEATHER, NOW], **fields)
        assert len(told(stream(mistral), ["[TOOL_CALLS]now{}"])["tool_calls"][0]["id"]) == 9


def test_tools_are_looked_for_in_the_content_only(bytewise: Tokenizer) -> None:
    thinking = form(bytewise, reasoning="qwen3", tools=[WEATHER])
    assert thinking.opening is Opening.FREE
    message = told(stream(thinking), list(f"<think>\nI could {CALL}\n</think>\n\n{CALL}"))
    assert message["reasoning_content"] == f"I could {CALL}"
    assert names(message) == [("weather", '{"city": "é"}')]


def test_the_prompt_may_have_opened_the_reasoning(bytewise: Tokenizer) -> None:
    inside = form(bytewise, "assistant\n<think>\n", reasoning="qwen3")
    message = told(stream(inside), ["a", "b</think>c"])
    assert message == {
        "role": "assistant",
        "content": "c",
        "reasoning": "ab",
        "reasoning_content": "ab",
    }
    wanted = {"role": "assistant", "content": None, "reasoning": "a", "reasoning_content": "a"}
    assert told(stream(inside), ["a"]) == wanted
    assert form(bytewise, "<think></think>\n\n", reasoning="qwen3").opening is Opening.BEHIND


def test_reasoning_that_is_not_wanted_is_left_out(bytewise: Tokenizer) -> None:
    quiet = form(bytewise, "<think>", reasoning="qwen3", include_reasoning=False)
    assert told(stream(quiet), ["a</think>b"]) == {
        "role": "assistant",
        "content": "b",
        "reasoning": None,
    }


@pytest.fixture(scope="module")
def with_markers() -> Tokenizer:
    """Bytes, and all markers as tokens of their own: special ones, but for `</tool_call>`."""
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(BYTE_CHARS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    markers = [
        "<think>",
        "</think>",
        "<tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|end|>",
    ]
    backend.add_special_tokens([AddedToken(marker, normalized=False) for marker in markers])
    backend.add_tokens([AddedToken("</tool_call>", normalized=False)])
    return Tokenizer(backend, byte_level, (2,))


def test_markers_that_are_special_tokens_are_rendered_and_hidden(with_markers: Tokenizer) -> None:
    auto = form(with_markers, "<think>", reasoning="qwen3", tools=[WEATHER])
    assert set(auto.hidden.values()) == {"<think>", "</think>", "<tool_call>"}
    assert stream(auto).rendered == {
        with_markers.special_id(marker) for marker in auto.hidden.values()
    }
    # Wherever one stands, the client never sees it.
    message = told(stream(auto), list(f"a<tool_call>b</think>c<think>d<tool_call>e{CALL}f</think>"))
    assert (message["reasoning_content"], message["content"]) == ("ab", "cdef")
    # Who asks for special tokens gets them.
    shown = form(with_markers, tools=[WEATHER], skip_special_tokens=False)
    assert shown.hidden == {}
    assert told(stream(shown), ["<tool_call>oops"])["content"] == "<tool_call>oops"


_SHREDS = [
    "<think>",
    "</think>",
    "</th",
    "<tool_call>",
    CALL,
    '{"name": "f", "arguments": {',
    '"a": 1}}',
    "<",
    "\n",
    " ",
]
_SHREDS += ["é", "x", "[TOOL_CALLS]", '[{"name": "f", "parameters": {}}]', "now{}"]


@settings(max_examples=300)
@given(
    shreds=st.lists(st.sampled_from(_SHREDS), max_size=10),
    cut=st.integers(0, 200),
    parser=st.sampled_from(["hermes", "llama3_json", "mistral", "json"]),
    fields=st.sampled_from(
        [{}, {"tool_choice": "required"}, {"parallel_tool_calls": False}, {"tool_choice": "none"}]
    ),
    prompt=st.sampled_from(["x", "<think>\n", "</think>"]),
    reasoning=st.sampled_from(["", "qwen3"]),
)
def test_deltas_add_up_to_the_message_and_a_replay_goes_on_anywhere(
    with_markers: Tokenizer,
    shreds: list[str],
    cut: int,
    parser: str,
    fields: dict[str, Any],
    prompt: str,
    reasoning: str,
) -> None:
    wanted = form(with_markers, prompt, parser, reasoning, tools=[WEATHER], **fields)
    text = "".join(shreds)
    whole = told(stream(wanted), [text])
    assert told(stream(wanted), list(text)) == whole
    first, second = stream(wanted), stream(wanted)
    before = [delta for char in text[:cut] for delta in first.push(char)]
    second.push(text[:cut])  # said already
    behind = [delta for char in text[cut:] for delta in second.push(char)] + second.finish()
    assert added_up(before + behind) == whole
    assert msgspec.to_builtins(second.message()) == whole


def test_ordinary_tokens_are_no_special_ones(with_markers: Tokenizer) -> None:
    assert [with_markers.special_id(text) for text in ("</tool_call>", "a", "nothing")] == [
        None,
        None,
        None,
    ]
