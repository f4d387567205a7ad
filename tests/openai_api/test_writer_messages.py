"""Answers with tool calls and reasoning: their shapes, and that a hand-over at any token leaves no
trace in them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvrelay.openai_api.message_stream import message_form
from kvrelay.openai_api.model_formats import REASONING_FORMATS, TOOL_FORMATS
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.transfer import ChoiceSoFar
from tests.openai_api.answers import answer_writer, asked, fed, with_markers

TOOLS = [
    {"type": "function", "function": {"name": "weather"}},
    {"type": "function", "function": {"name": "now"}},
]
MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
]
TEXTS = {
    "hermes": 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "é😀", "x": '
    '"{\\"}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "é"}}; {"name": '
    '"now", "parameters": {}}',
    "mistral": 'Hm[TOOL_CALLS]weather[ARGS]{"city": "é"}[TOOL_CALLS]now{}',
    "json": '[{"name": "weather", "arguments": {"city": "é"}}, {"name": "now", "arguments": {}}]',
}


@pytest.fixture(scope="module", params=["special", "ordinary"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Bytes; the markers are special tokens, or tokens like others."""
    return with_markers(MARKERS) if request.param == "special" else with_markers((), MARKERS)


def writer(
    tokenizer: Tokenizer, parser: str, fields: dict[str, Any], prompt: str = "x", **so_far: Any
) -> AnswerWriter:
    request = asked("chat", {"tools": TOOLS, **fields})
    form = message_form(
        request,
        tokenizer,
        tokenizer.encode(prompt, False),
        tool_format=TOOL_FORMATS[parser],
        reasoning=REASONING_FORMATS["qwen3"] if "think" in prompt else None,
    )
    return answer_writer(request, tokenizer, so_far=[ChoiceSoFar(**so_far)], message_form=form)


def feed(answer: AnswerWriter, ids: list[int]) -> bytes:
    return fed(answer, ids, [TokenLogprobs(token, -0.5) for token in ids])


def end(answer: AnswerWriter, finish: Finish = Finish.STOP) -> bytes:
    return answer.end(0, finish) + answer.close()


def added_up(payload: bytes) -> dict[str, Any]:
    """The choice of a stream as the official client's types read it."""
    events = payload.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    finish = None
    for at, event in enumerate(events[:-2]):
        chunk = ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)
        (choice,) = chunk.choices
        assert finish is None, "the finish reason is in the last chunk"
        finish = choice.finish_reason
        assert (choice.delta.role == "assistant") == (at == 0)
        message["content"] += choice.delta.content or ""
        if reasoning := getattr(choice.delta, "reasoning_content", None):
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        assert len(choice.delta.tool_calls or ()) <= 1
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert (call.index, call.type) == (len(message["tool_calls"]), "function")
                message["tool_calls"].append(
                    {"id": call.id, "name": call.function.name, "arguments": ""}
                )
            message["tool_calls"][call.index]["arguments"] += call.function.arguments or ""
    return {"message": message, "finish": finish}


def whole(payload: bytes) -> dict[str, Any]:
    """The same of a whole answer."""
    choice = ChatCompletion.model_validate_json(payload, strict=True).choices[0]
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls or ()
        if call.type == "function"
    ]
    message = {
        "role": choice.message.role,
        "content": choice.message.content or "",
        "tool_calls": calls,
    }
    if reasoning := getattr(choice.message, "reasoning_content", None):
        message["reasoning_content"] = reasoning
    return {"message": message, "finish": choice.finish_reason}


def test_a_call_that_was_cut_off_ends_with_length(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('<tool_call>{"name": "now", "arguments": {"a', False)
    cut = writer(tokenizer, "hermes", {"stream": True})
    got = added_up(feed(cut, ids) + end(cut, Finish.LENGTH))
    assert (got["finish"], got["message"]["tool_calls"][0]["arguments"]) == ("length", '{"a')


def test_a_stop_string_behind_which_nothing_counts(tokenizer: Tokenizer) -> None:
    body = writer(tokenizer, "hermes", {"stop": ["</tool_call>"], "logprobs": True})
    feed(body, tokenizer.encode(TEXTS["hermes"], False))
    assert body.choices[0].stopped
    got = whole(end(body))
    assert [call["name"] for call in got["message"]["tool_calls"]] == ["weather"]


_SHREDS = [
    *MARKERS,
    *"ab{}[]é \n",
    '"name"',
    ": ",
    '{"name": "now", "arguments": {',
    '"x": 1}}',
    *TEXTS.values(),
]


@settings(max_examples=120)
@given(
    shreds=st.lists(st.sampled_from(_SHREDS), max_size=6),
    parser=st.sampled_from(list(TEXTS)),
    stream=st.booleans(),
    prompt=st.sampled_from(["x", "<think>\n", "</think>"]),
    fields=st.sampled_from(
        [
            {},
            {"stop": ["}}", "</tool"]},
            {"logprobs": True},
            {"include_reasoning": False},
            {"tool_choice": "required"},
        ]
    ),
)
def test_a_hand_over_at_any_token_leaves_no_trace(
    tokenizer: Tokenizer,
    shreds: list[str],
    parser: str,
    stream: bool,
    prompt: str,
    fields: dict[str, Any],
) -> None:
    """For every cut: what one writer has said and what a second one adds are, to the byte, what one
    alone says.
    """
    ids = tokenizer.encode("".join(shreds), False)[:150]
    fields = {**fields, "stream": stream}
    alone = writer(tokenizer, parser, fields, prompt)
    wanted = feed(alone, ids) + end(alone)
    if stream:
        body = writer(tokenizer, parser, fields | {"stream": False}, prompt)
        assert added_up(wanted) == whole(feed(body, ids) + end(body))
    first = writer(tokenizer, parser, fields, prompt)
    payload = b""
    for cut in range(len(ids) + 1):
        known = first.choices[0].token_ids
        so_far: dict[str, Any] = {
            "generated": list(known),
            "sent_text": first.choices[0].sent_text if known else None,
        }
        if "logprobs" in fields:
            so_far["logprobs"] = [TokenLogprobs(token, -0.5) for token in known]
        second = writer(tokenizer, parser, fields, prompt, **so_far)
        assert second.choices[0].sent_text == first.choices[0].sent_text
        assert payload + feed(second, ids[cut:]) + end(second) == wanted
        if first.choices[0].stopped or cut == len(ids):
            break
        payload += feed(first, ids[cut : cut + 1])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("text", "thinks"), [("<think>h</think>a", True), ("a", False)])
def test_an_answer_tells_if_it_has_thoughts(
    tokenizer: Tokenizer, text: str, *, thinks: bool, stream: bool
) -> None:
    answer = writer(tokenizer, "hermes", {"stream": stream}, "think")
    feed(answer, tokenizer.encode(text, False))
    end(answer)
    assert answer.choices[0].message.thinks is thinks
