"""Answers of several choices, and what else surrounds the text of a choice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.body import choice_count, decode_chat, decode_completion, sampling_params
from kvrelay.openai_api.logprobs import ScoredPrompt
from kvrelay.openai_api.prompt import Beginning
from kvrelay.openai_api.sse import joined_body, joined_end
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.transfer import ChoiceSoFar

HEAD: dict[str, Any] = {
    "response_id": "id-1",
    "created": 7,
    "model": "m",
    "prompt_tokens": 5,
    "cached_tokens": 4,
}


def writer(
    tokenizer: Tokenizer, kind: str, fields: dict[str, Any], so_far: Any = None, **more: Any
) -> AnswerWriter:
    if kind == "chat":
        request: Any = decode_chat(
            json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
        )
    else:
        request = decode_completion(
            json.dumps({"prompt": "x", "max_tokens": 500, **fields}).encode()
        )
    params = sampling_params(
        request, prompt_tokens=5, max_model_len=1000, vocab_size=300, default_seed=1
    )
    choices = so_far or [ChoiceSoFar()] * choice_count(request)
    return AnswerWriter(request, tokenizer, params, **HEAD, so_far=choices, **more)


def lps(ids: list[int], each: float = -0.5) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, each, (token, 65), (each, -1.25)) for token in ids]


def chunks(payload: bytes) -> list[Any]:
    return [
        json.loads(event.removeprefix("data: "))
        for event in payload.decode().split("\n\n")[:-1]
        if "[DONE]" not in event
    ]


def test_choices_come_interleaved_each_with_its_index_role_and_end(bytewise: Tokenizer) -> None:
    w = writer(
        bytewise, "chat", {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    )
    payload = w.tokens(1, [65]) + w.tokens(0, [66]) + w.end(1, Finish.STOP)
    assert not w.ended
    payload += w.tokens(0, [67]) + w.end(0, Finish.LENGTH)
    assert w.ended
    payload += w.close()
    assert payload.endswith(b"data: [DONE]\n\n")
    *said, usage = chunks(payload)
    told = [
        (c["index"], c["delta"], c["finish_reason"]) for chunk in said for c in chunk["choices"]
    ]
    assert told == [
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "A"}, None),
        (0, {"role": "assistant", "content": ""}, None),
        (0, {"content": "B"}, None),
        (1, {}, "stop"),
        (0, {"content": "C"}, None),
        (0, {}, "length"),
    ]
    assert (
        usage["choices"],
        usage["usage"]["completion_tokens"],
        usage["usage"]["prompt_tokens"],
    ) == ([], 3, 5)


def test_whole_choices_are_in_order_whoever_ends_first(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "completion", {"n": 2})
    assert (
        w.tokens(1, [65]) + w.end(1, Finish.STOP) + w.tokens(0, [66, 67]) + w.end(0, Finish.LENGTH)
        == b""
    )
    answer = json.loads(w.close())
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "BC", "length"),
        (1, "A", "stop"),
    ]
    assert answer["usage"]["completion_tokens"] == 3


def test_the_likeliest_of_more_choices_are_returned_and_all_tokens_count(
    bytewise: Tokenizer,
) -> None:
    w = writer(bytewise, "completion", {"n": 2, "best_of": 4})
    for choice, each in enumerate((-1.0, -0.2, -3.0, -0.4)):
        w.tokens(choice, [65 + choice, 66], lps([65 + choice, 66], each))
        w.end(choice, Finish.LENGTH)
    answer = json.loads(w.close())
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, "BB", None),
        (1, "DB", None),
    ]
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_begins_with_what_it_repeats(bytewise: Tokenizer, stream: bool) -> None:
    for kind in ("chat", "completion"):
        w = writer(
            bytewise, kind, {"stream": stream, "n": 2}, beginning=Beginning("user", "said: ")
        )
        payload = (
            b"".join([w.tokens(choice, [65]) + w.end(choice, Finish.STOP) for choice in (0, 1)])
            + w.close()
        )
        if stream:
            of_1 = [c for chunk in chunks(payload) for c in chunk["choices"] if c["index"] == 1]
            text = [c["delta"].get("content", "") if kind == "chat" else c["text"] for c in of_1]
            assert "".join(text) == "said: A"
            assert kind == "completion" or of_1[0]["delta"] == {"role": "user", "content": ""}
        else:
            choice = json.loads(payload)["choices"][1]
            said = (
                choice["message"] if kind == "chat" else {"role": "user", "content": choice["text"]}
            )
            assert said == {"role": "user", "content": "said: A"} | (
                {"reasoning": None} if kind == "chat" else {}
            )


def test_offsets_of_tokens_are_those_in_the_text_with_what_it_repeats(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "completion", {"logprobs": 0}, beginning=Beginning(echo="said: "))
    w.tokens(0, [65, 66], lps([65, 66]))
    w.end(0, Finish.STOP)
    assert json.loads(w.close())["choices"][0]["logprobs"]["text_offset"] == [6, 7]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [9, 0])
def test_an_echo_with_log_probabilities_lists_the_prompt_first(
    bytewise: Tokenizer, stream: bool, max_tokens: int
) -> None:
    fields = {"echo": True, "logprobs": 1, "stream": stream, "max_tokens": max_tokens, "n": 2}
    w = writer(bytewise, "completion", fields, beginning=Beginning(echo="said"))
    w.scored_prompt = ScoredPrompt(list(b"said"), lps(list(b"aid")))
    payload = (
        b"".join([w.tokens(c, [65, 66], lps([65, 66])) + w.end(c, Finish.STOP) for c in (0, 1)])
        + w.close()
    )
    said = [
        c
        for answer in (chunks(payload) if stream else [json.loads(payload)])
        for c in answer["choices"]
    ]
    more = (["A", "B"], [4, 5]) if max_tokens else ([], [])
    for index in (0, 1):
        lists = [c["logprobs"] for c in said if c["index"] == index and c["logprobs"]]
        assert [token for each in lists for token in each["tokens"]] == [*"said", *more[0]]
        assert [at for each in lists for at in each["text_offset"]] == [0, 1, 2, 3, *more[1]]
        assert lists[0]["token_logprobs"][:2] == [None, -0.5]
        assert lists[0]["top_logprobs"][:2] == [None, {"a": -0.5}]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_log_probabilities_of_the_prompt_are_part_of_a_whole_answer(
    bytewise: Tokenizer, kind: str
) -> None:
    w = writer(bytewise, kind, {"prompt_logprobs": 1, "n": 2})
    w.scored_prompt = ScoredPrompt([7, 65], lps([65]))
    for choice in (0, 1):
        w.tokens(choice, [66])
        w.end(choice, Finish.LENGTH)
    answer = json.loads(w.close())
    told = [None, {"65": {"logprob": -0.5, "rank": 0, "decoded_token": "A"}}]
    assert [
        where["prompt_logprobs"] for where in ([answer] if kind == "chat" else answer["choices"])
    ] == ([told] if kind == "chat" else [told, told])
    assert ("prompt_logprobs" in answer) == (kind == "chat")


@pytest.mark.parametrize("stream", [True, False])
def test_who_wants_the_prompt_only_gets_no_token(bytewise: Tokenizer, stream: bool) -> None:
    fields = {"echo": True, "max_tokens": 0, "stream": stream}
    w = writer(bytewise, "completion", fields, beginning=Beginning(echo="said"))
    payload = w.tokens(0, [65]) + w.end(0, Finish.STOP) + w.close()
    said = [
        c
        for answer in (chunks(payload) if stream else [json.loads(payload)])
        for c in answer["choices"]
    ]
    assert "".join(c["text"] for c in said) == "said"
    assert said[-1]["finish_reason"] == "length"
    assert w.counts == (5, 0, 4)


def test_tokens_are_named_by_id_if_that_is_asked(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "completion", {"logprobs": 1, "return_tokens_as_token_ids": True})
    w.tokens(0, [0xC3], lps([0xC3]))
    w.end(0, Finish.STOP)
    logprobs = json.loads(w.close())["choices"][0]["logprobs"]
    assert (logprobs["tokens"], list(logprobs["top_logprobs"][0])) == (
        ["token_id:195"],
        ["token_id:195", "token_id:65"],
    )
    w = writer(
        bytewise, "chat", {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    )
    w.tokens(0, [0xC3], lps([0xC3]))
    w.end(0, Finish.STOP)
    (entry,) = json.loads(w.close())["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["top_logprobs"][1]["token"]) == (
        "token_id:195",
        [0xC3],
        "token_id:65",
    )


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_token_ids_come_with_the_text_and_in_the_whole(bytewise: Tokenizer, kind: str) -> None:
    ids, begins = [104, 0xC3, 0xA9, 2], Beginning(prompt_token_ids=[7, 8])
    w = writer(bytewise, kind, {"return_token_ids": True}, beginning=begins)
    w.tokens(0, ids)
    w.end(0, Finish.STOP)
    answer = json.loads(w.close())
    choice = answer["choices"][0]
    assert (choice["token_ids"], (answer if kind == "chat" else choice)["prompt_token_ids"]) == (
        ids,
        [7, 8],
    )
    w = writer(bytewise, kind, {"return_token_ids": True, "stream": True}, beginning=begins)
    said = chunks(
        b"".join([w.tokens(0, [token]) for token in ids]) + w.end(0, Finish.STOP) + w.close()
    )
    assert [token for chunk in said for token in chunk["choices"][0].get("token_ids", [])] == ids
    prompts = [
        c["prompt_token_ids"]
        for chunk in said
        for c in (chunk, chunk["choices"][0])
        if "prompt_token_ids" in c
    ]
    assert prompts == [[7, 8]]


def test_parts_are_joined_with_their_own_indices_and_summed_usage(bytewise: Tokenizer) -> None:
    bodies = []
    for part in range(2):
        w = writer(bytewise, "completion", {"n": 2}, part=True, first_index=2 * part)
        for choice in (0, 1):
            w.tokens(choice, [65 + 2 * part + choice])
            w.end(choice, Finish.STOP)
        bodies.append(w.close())
    answer = json.loads(joined_body(bodies))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "A"),
        (1, "B"),
        (2, "C"),
        (3, "D"),
    ]
    assert answer["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 8}
    }  # fmt: skip
    streamed = writer(
        bytewise,
        "completion",
        {"stream": True, "stream_options": {"include_usage": True}},
        part=True,
    )
    assert (
        b"[DONE]" not in streamed.tokens(0, [65]) + streamed.end(0, Finish.STOP) + streamed.close()
    )
    end = joined_end([(5, 2, 4)] * 2, include_usage=True, response_id="id-1", created=7, model="m")
    assert chunks(end)[0]["usage"] == answer["usage"]


_TOKENS = st.lists(st.sampled_from([*b"abEND", 0xC3, 0xA9, 2]), min_size=1, max_size=12)


@settings(max_examples=100)
@example([[97]], [1, 0, 0], "completion", False, [], True, {"echo": True})
@example(
    ids=[[97]],
    cuts=[1, 0, 0],
    kind="completion",
    stream=False,
    stop=[],
    logprobs=True,
    extra={"echo": True},
)
@given(
    ids=st.lists(_TOKENS, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    kind=st.sampled_from(["chat", "completion"]),
    stream=st.booleans(),
    stop=st.sampled_from([[], ["END"]]),
    logprobs=st.booleans(),
    extra=st.sampled_from([{}, {"return_token_ids": True}, {"echo": True}]),
)
def test_each_choice_goes_on_where_another_node_left_it(
    bytewise: Tokenizer,
    ids: list[list[int]],
    cuts: list[int],
    kind: str,
    stream: bool,
    stop: list[str],
    logprobs: bool,
    extra: dict[str, bool],
) -> None:
    fields: dict[str, Any] = {"stop": stop, "stream": stream, "n": len(ids), **extra}
    if logprobs:
        fields |= {"logprobs": True} if kind == "chat" else {"logprobs": 1}
    begins = Beginning(
        echo="said" if extra.get("echo") else "",
        prompt_token_ids=[7] if "return_token_ids" in extra else None,
    )

    def feed(w: AnswerWriter, choice: int, tokens: list[int]) -> bytes:
        payload = b""
        if tokens:
            w.scored_prompt = ScoredPrompt([7, 65, 66], lps([65, 66]))
        for token in tokens:
            if not w.choices[choice].stopped:
                payload += w.tokens(choice, [token], lps([token]))
        return payload

    def events_of(payload: bytes, choice: int) -> list[Any]:
        return [c for c in chunks(payload) if c["choices"] and c["choices"][0]["index"] == choice]

    alone = writer(bytewise, kind, fields, beginning=begins)
    wanted = b"".join(
        [feed(alone, c, tokens) + alone.end(c, Finish.LENGTH) for c, tokens in enumerate(ids)]
    )
    wanted_end = alone.close()
    first = writer(bytewise, kind, fields, beginning=begins)
    payload = b""
    so_far = []
    for c, tokens in enumerate(ids):
        payload += feed(first, c, tokens[: cuts[c]])
        choice, finish = first.choices[c], None
        if cuts[c] >= len(tokens):
            payload, finish = payload + first.end(c, Finish.LENGTH), Finish.LENGTH
        known = choice.token_ids
        so_far.append(
            ChoiceSoFar(
                generated=known,
                logprobs=lps(known),
                sent_text=choice.sent_text if known else None,
                finish=finish,
            )
        )
    second = writer(bytewise, kind, fields, so_far, beginning=begins)
    second.scored_prompt = (
        first.scored_prompt
    )  # the hand-over brings it, also if nothing is left to be computed
    for c, tokens in enumerate(ids):
        assert second.choices[c].ended == (so_far[c].finish is not None)
        if not second.choices[c].ended:
            payload += feed(second, c, tokens[cuts[c] :]) + second.end(c, Finish.LENGTH)
    assert second.close() == wanted_end
    for c in range(len(ids)):
        assert events_of(payload, c) == events_of(wanted, c)
