"""Tokens in, tokens out: the completion that a request means, and the answer in vLLM's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.openai_api.body import decode_completion
from kvrelay.openai_api.dialects.generate import translate_generate
from kvrelay.openai_api.sse import DONE
from kvrelay.wire.errors import ErrorBody, NodeFailed, RequestError

ASKED = {"model": "tiny", "token_ids": [5, 6], "sampling_params": {"temperature": 0.5}}
SCORED = {
    "text_offset": [0],
    "token_logprobs": [-0.5],
    "tokens": ["token_id:7"],
    "top_logprobs": [{"token_id:7": -0.5}],
}
USAGE = {
    "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip


def body_of(**fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(translate_generate(json.dumps(ASKED | fields).encode())[0])
    return told


def chunk(**choice: Any) -> bytes:
    head = {"id": "cmpl-r1", "object": "text_completion", "created": 1, "model": "tiny"}
    return (
        b"data: %b\n\n"
        % json.dumps(head | {"choices": [{"index": 0, "text": "", **choice}]}).encode()
    )


def test_a_request_means_a_completion_with_its_tokens_as_the_prompt() -> None:
    sampling = {
        "max_tokens": 4,
        "logprobs": 1,
        "stop_token_ids": [9],
        "detokenize": False,
        "prompt": "x",
        "echo": True,
    }
    told = decode_completion(
        json.dumps(body_of(sampling_params=sampling, stream=True, request_id="r1")).encode()
    )
    assert (told.prompt, told.max_tokens, told.logprobs, told.stop_token_ids) == ([5, 6], 4, 1, [9])
    assert (told.stream, told.request_id, told.echo) == (True, "r1", None)
    assert told.return_token_ids
    assert told.return_tokens_as_token_ids


def test_without_max_tokens_as_many_are_meant_as_fit() -> None:
    told = body_of()
    assert (told["max_tokens"], told["fit_max_tokens"], told["temperature"]) == (None, True, 0.5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"), ({"token_ids": ["x"]}, "token_ids[0]"), ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [2**64]}, "token_ids[0]"), ({"token_ids": "hi"}, "token_ids"),
        ({"token_ids": [True]}, "token_ids[0]"), ({"token_ids": [[1]]}, "token_ids[0]"),
        ({"sampling_params": None}, "sampling_params"), ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": {"detokenize": False, "stop": ["x"]}}, "stop"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        body_of(**fields)
    assert refused.value.param == param


def test_a_whole_answer_has_tokens_and_no_text() -> None:
    choices = [
        {
            "index": 0,
            "text": "a",
            "logprobs": SCORED,
            "finish_reason": "stop",
            "stop_reason": 9,
            "token_ids": [7],
        },
        {
            "index": 1,
            "text": "bc",
            "logprobs": None,
            "finish_reason": "length",
            "token_ids": [8, 9],
        },
    ]
    choices[0]["prompt_logprobs"] = [
        None,
        {"6": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}},
    ]
    answer = {"id": "cmpl-r1", "model": "tiny", "choices": choices, "usage": USAGE}
    dialect = translate_generate(json.dumps(ASKED).encode())[1]
    told = json.loads(dialect.whole(json.dumps(answer).encode()))
    top = [{"token": "token_id:7", "logprob": -0.5, "bytes": None}]
    scored = {"token": "token_id:7", "logprob": -0.5, "bytes": None, "top_logprobs": top}
    assert told == {
        "request_id": "r1",
        "choices": [
            {
                "index": 0,
                "logprobs": {"content": [scored]},
                "finish_reason": "stop",
                "token_ids": [7],
            },
            {"index": 1, "logprobs": None, "finish_reason": "length", "token_ids": [8, 9]},
        ],
        "usage": USAGE,
        "prompt_logprobs": choices[0]["prompt_logprobs"],
    }


def test_a_stream_cut_anywhere_gives_the_same_events_each_with_its_tokens() -> None:
    usage = b"data: %b\n\n" % json.dumps({"id": "cmpl-r1", "choices": [], "usage": USAGE}).encode()
    parts = [
        chunk(prompt_token_ids=[5, 6]),
        chunk(token_ids=[7], text="é", logprobs=SCORED),
        chunk(finish_reason="stop"),
    ]
    stream = b"".join(parts) + b": keep-alive\n\n" + usage + DONE
    body = json.dumps(ASKED | {"stream": True, "request_id": "mine"}).encode()
    once = translate_generate(body)[1].events(stream)
    for at in range(len(stream)):
        dialect = translate_generate(body)[1]
        assert (
            dialect.events(stream[:at]) + dialect.events(stream[at:]) + dialect.events(b"") == once
        )
    *events, done, rest = once.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [each["request_id"] for each in told] == ["mine"] * 3
    assert [[(one["token_ids"], one["finish_reason"]) for one in each["choices"]] for each in told] == [
        [([7], None)], [([], "stop")], [],
    ]  # fmt: skip
    assert told[2]["usage"] == USAGE


def test_errors_name_the_field_of_this_api() -> None:
    dialect = translate_generate(json.dumps(ASKED).encode())[1]
    error = ErrorBody("too long", "invalid_request_error", "prompt", "context_length_exceeded")
    assert json.loads(dialect.error(400, error))["error"]["param"] == "token_ids"
    stream = (
        b'data: {"error":{"message":"it broke","type":"node_failed","param":null,"code":null}}\n\n'
        + DONE
    )
    assert b"it broke" in dialect.events(stream)
    for body in (b"{", b'{"choices":[]}'):
        with pytest.raises(NodeFailed):
            dialect.whole(body)
    assert b"malformed" in translate_generate(json.dumps(ASKED).encode())[1].events(b"data: {\n\n")
