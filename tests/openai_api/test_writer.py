"""Answers: their shapes, and that a hand-over at any token leaves no trace in the bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from kvrelay.openai_api.logprobs import ScoredPrompt
from kvrelay.openai_api.prompt import Beginning
from kvrelay.openai_api.sse import joined_body, joined_end, summed_usage
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.errors import NodeFailed, RequestError
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.transfer import ChoiceSoFar
from tests.openai_api.answers import answer_writer, asked, fed

EOS = 2
KINDS = pytest.mark.parametrize("kind", ["chat", "completion"])
STREAMS = pytest.mark.parametrize("stream", [True, False])
USAGE_OPTIONS = {"stream": True, "stream_options": {"include_usage": True}}
USAGE_IN_CHUNKS = {"stream": True, "stream_options": {"continuous_usage_stats": True}}


def writer(
    tokenizer: Tokenizer, kind: str, fields: dict[str, Any], so_far: Any = None, **more: Any
) -> AnswerWriter:
    request = asked(kind, fields)
    choices = so_far or [ChoiceSoFar()] * (request.n or 1)
    return answer_writer(request, tokenizer, cached_tokens=4, so_far=choices, **more)


def lps(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, (token, 65), (-0.5, -1.25)) for token in ids]


def with_logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}


def feed(w: AnswerWriter, ids: list[int], choice: int = 0) -> bytes:
    return fed(w, ids, lps(ids), choice)


def finish(w: AnswerWriter, why: Finish = Finish.STOP, **handover: Any) -> bytes:
    return w.end(0, why) + w.close(**handover)


def answered(w: AnswerWriter, ids: list[int], why: Finish = Finish.STOP) -> Any:
    """The whole answer of a writer that does not stream, or the chunks of one that does."""
    payload = feed(w, ids) + finish(w, why)
    return chunks_of(payload) if w.streams else json.loads(payload)


def chunks_of(payload: bytes) -> list[Any]:
    """The JSON of each event but [DONE]."""
    *events, rest = payload.decode().split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    assert not any("[DONE]" in event for event in events[:-1])
    return [json.loads(event[6:]) for event in events if event != "data: [DONE]"]


def choices_of(answer: Any) -> list[Any]:
    return [
        c for each in (answer if isinstance(answer, list) else [answer]) for c in each["choices"]
    ]


def text_in(kind: str, chunks: list[Any]) -> str:
    choices = choices_of(chunks)
    return "".join(c["delta"].get("content", "") if kind == "chat" else c["text"] for c in choices)


def usage(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@pytest.mark.parametrize(
    ("kind", "what", "parts"),
    [
        (
            "chat",
            "chat.completion.chunk",
            [
                {"delta": {"role": "assistant", "content": ""}},
                {"delta": {"content": "h"}},
                {"delta": {"content": "é"}},
                {"delta": {}},
            ],
        ),
        ("completion", "text_completion", [{"text": "h"}, {"text": "é"}, {"text": ""}]),
    ],
)
def test_a_stream_has_text_finish_usage_and_done(
    bytewise: Tokenizer, kind: str, what: str, parts: list[Any]
) -> None:
    w = writer(bytewise, kind, USAGE_OPTIONS)
    payload = feed(w, [*bytewise.encode("hé", False), EOS]) + finish(w)
    assert payload.endswith(b"data: [DONE]\n\n")
    head = {"id": "id-1", "object": what, "created": 7, "model": "m"}
    plain = {"index": 0, "logprobs": None, "finish_reason": None}
    choices = [plain | part for part in parts]
    choices[-1] |= {"finish_reason": "stop", "stop_reason": None}
    assert chunks_of(payload) == [
        *({**head, "choices": [choice]} for choice in choices),
        {**head, "choices": [], "usage": usage(5, 4, 4)},
    ]


@pytest.mark.parametrize(
    ("kind", "what", "said"),
    [
        (
            "chat",
            "chat.completion",
            {"message": {"role": "assistant", "content": "hé", "reasoning": None}},
        ),
        ("completion", "text_completion", {"text": "hé"}),
    ],
)
def test_whole_answers(bytewise: Tokenizer, kind: str, what: str, said: dict[str, Any]) -> None:
    w = writer(bytewise, kind, {})
    assert w.tokens(0, [*bytewise.encode("hé", False), EOS]) == b""
    end = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert json.loads(finish(w)) == {
        "id": "id-1", "object": what, "created": 7, "model": "m", "usage": usage(5, 4, 4),
        "choices": [end | said],
    }  # fmt: skip


def test_a_stop_string_ends_the_answer_and_drops_what_follows(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", {"stream": True, "stop": ["END"]})
    payload = w.tokens(0, bytewise.encode("aENDbc", False))
    assert w.choices[0].stopped
    assert w.choices[0].token_ids == bytewise.encode("aEND", False)
    assert w.tokens(0, [65]) == b""
    chunks = chunks_of(payload + finish(w, Finish.ABORT))
    assert text_in("chat", chunks) == "a"
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    whole = writer(bytewise, "completion", {"stop": "END", "include_stop_str_in_output": True})
    answer = answered(whole, bytewise.encode("aENDbc", False), Finish.LENGTH)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("aEND", 4)


@KINDS
@STREAMS
def test_what_was_held_back_comes_with_the_end(
    bytewise: Tokenizer, kind: str, stream: bool
) -> None:
    ids = [*bytewise.encode("aEN", False), 0xC3]
    answer = answered(writer(bytewise, kind, {"stop": "N!", "stream": stream}), ids, Finish.LENGTH)
    said = answer if stream else [answer]
    told = [
        c.get("delta") or c.get("message") or {"content": c.get("text")} for c in choices_of(said)
    ]
    assert "".join(each.get("content") or "" for each in told) == "aEN\ufffd"


@pytest.mark.parametrize(
    ("last", "why", "text", "reason"),
    [
        (66, Finish.STOP, "AB", 66),
        (EOS, Finish.STOP, "A", None),
        # Not special, so it stays in the text; at the token limit it did not end the answer.
        (66, Finish.LENGTH, "AB", None),
    ],
)
def test_the_stop_reason_is_a_stop_token_that_the_request_named(
    bytewise: Tokenizer, last: int, why: Finish, text: str, reason: int | None
) -> None:
    w = writer(bytewise, "completion", {"stop_token_ids": [66]})
    (choice,) = answered(w, [65, last], why)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text,
        why.value,
        reason,
    )


def test_usage_in_every_chunk(bytewise: Tokenizer) -> None:
    chunks = answered(writer(bytewise, "completion", USAGE_IN_CHUNKS), [65, 66], Finish.LENGTH)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_logprobs_of_a_chat(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", with_logprobs("chat"))
    impossible = TokenLogprobs(0xC3, -0.5, (0xC3, 65), (-0.5, float("-inf")))
    w.tokens(0, [0xC3, EOS], [impossible, *lps([EOS])])
    content = json.loads(finish(w))["choices"][0]["logprobs"]["content"]
    half = {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]}
    top = [half, {"token": "A", "logprob": -9999.0, "bytes": [65]}]
    assert content[0] == {**half, "top_logprobs": top}
    assert content[1]["token"] == "<|end2|>"


def test_logprobs_of_a_completion_count_offsets_in_the_text_with_its_echo(
    bytewise: Tokenizer,
) -> None:
    w = writer(bytewise, "completion", {"logprobs": 1}, beginning=Beginning(echo="said: "))
    ids = [104, 0xC3, 0xA9, 33]
    w.tokens(0, ids, [TokenLogprobs(t, -0.5, (65,), (-0.25,)) for t in ids])
    names = ["h", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert json.loads(finish(w))["choices"][0]["logprobs"] == {
        "text_offset": [6, 7, 7, 8],
        "token_logprobs": [-0.5] * 4,
        "tokens": names,
        "top_logprobs": [{name: -0.5, "A": -0.25} for name in names],
    }


@KINDS
def test_streamed_logprobs_are_those_of_the_whole_answer(bytewise: Tokenizer, kind: str) -> None:
    ids = [*bytewise.encode("aé😀b", False), EOS]
    fields = with_logprobs(kind)
    streamed = choices_of(answered(writer(bytewise, kind, {**fields, "stream": True}), ids))
    (whole,) = answered(writer(bytewise, kind, fields), ids)["choices"]
    parts = [choice["logprobs"] for choice in streamed]
    got = {
        name: [entry for part in parts if part for entry in part[name]]
        for name in whole["logprobs"]
    }
    assert got == whole["logprobs"]


def test_a_broken_answer_ends_with_an_error_and_done(bytewise: Tokenizer) -> None:
    error = NodeFailed("the node is gone")
    body = {
        "error": {"message": "the node is gone", "type": "node_failed", "param": None, "code": None}
    }
    streamed = writer(bytewise, "chat", {"stream": True}).error(error)
    assert streamed.endswith(b"data: [DONE]\n\n")
    assert chunks_of(streamed) == [body]
    assert json.loads(writer(bytewise, "chat", {}).error(error)) == body


def test_missing_logprobs_of_a_hand_over_are_refused(bytewise: Tokenizer) -> None:
    with pytest.raises(RequestError, match="0 of 1 generated tokens"):
        writer(bytewise, "completion", {"logprobs": 1}, [ChoiceSoFar(generated=[65])])


@KINDS
def test_with_nothing_sent_yet_the_next_writer_sends_all(bytewise: Tokenizer, kind: str) -> None:
    """A third-party proxy throws the prefill node's answer away."""
    ids = bytewise.encode("hé!", False)
    so_far = ChoiceSoFar(generated=ids[:3], logprobs=lps(ids[:3]), sent_text=None)
    w = writer(bytewise, kind, {"stream": True, **with_logprobs(kind)}, [so_far])
    assert w.choices[0].sent_text == 0
    at_once = w.tokens(0, [])
    assert b"h\xc3\xa9" in at_once
    assert w.choices[0].sent_text == 2
    assert w.tokens(0, []) == b""
    chunks = chunks_of(at_once + feed(w, ids[3:]) + finish(w, Finish.LENGTH))
    assert text_in(kind, chunks) == "hé!"
    said = choices_of(chunks)
    if kind == "chat":
        assert [c["delta"].get("role") for c in said] == ["assistant", None, None, None]
    name = "content" if kind == "chat" else "tokens"
    assert sum(len(c["logprobs"][name]) for c in said if c["logprobs"]) == len(ids)


def test_a_replay_with_nothing_to_follow_is_sent_at_the_end(bytewise: Tokenizer) -> None:
    so_far = ChoiceSoFar(generated=[97, 98], sent_text=None)
    w = writer(bytewise, "chat", {"stream": True, "stop": "b"}, [so_far])
    assert w.choices[0].stopped
    said = choices_of(chunks_of(finish(w)))
    assert [c["delta"] for c in said] == [{"role": "assistant", "content": ""}, {"content": "a"}]
    assert said[-1]["stop_reason"] == "b"


# Several choices


def test_choices_come_interleaved_each_with_its_index_role_and_end(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", {"n": 2, **USAGE_OPTIONS})
    payload = w.tokens(1, [65]) + w.tokens(0, [66]) + w.end(1, Finish.STOP)
    assert not w.ended
    payload += w.end(0, Finish.LENGTH)
    assert w.ended
    chunks = chunks_of(payload + w.close())
    said = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for c in choices_of(chunks)]
    assert said == [
        *((1, "", None), (1, "A", None), (0, "", None), (0, "B", None)),
        *((1, None, "stop"), (0, None, "length")),
    ]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], usage(5, 2, 4))


def test_a_chat_begins_with_the_role_of_the_message_that_goes_on(bytewise: Tokenizer) -> None:
    for stream in (True, False):
        answer = answered(
            writer(bytewise, "chat", {"stream": stream}, beginning=Beginning("user")), [65]
        )
        first = choices_of(answer)[0]["delta" if stream else "message"]
        assert (first["role"], first["content"]) == ("user", "" if stream else "A")


@STREAMS
@pytest.mark.parametrize("max_tokens", [9, 0])
def test_an_echo_with_log_probabilities_lists_the_prompt_first(
    bytewise: Tokenizer, stream: bool, max_tokens: int
) -> None:
    fields = {"echo": True, "logprobs": 1, "stream": stream, "max_tokens": max_tokens}
    w = writer(bytewise, "completion", fields, beginning=Beginning(echo="said"))
    w.beginning.scored_prompt = ScoredPrompt(list(b"said"), lps(list(b"aid")))
    said = choices_of(answered(w, [65, 66]))
    lists = [c["logprobs"] for c in said if c["logprobs"]]
    tokens = ["A", "B"] if max_tokens else []
    assert [token for each in lists for token in each["tokens"]] == [*"said", *tokens]
    assert [at for each in lists for at in each["text_offset"]] == list(range(4 + len(tokens)))
    assert lists[0]["token_logprobs"][:2] == [None, -0.5]
    assert lists[0]["top_logprobs"][:2] == [None, {"a": -0.5}]
    assert "".join(c["text"] for c in said) == "".join(["said", *tokens])
    assert max_tokens or said[-1]["finish_reason"] == "length"
    assert w.counts == (5, len(tokens), 4)


@KINDS
def test_token_ids_come_with_the_text_and_in_the_whole(bytewise: Tokenizer, kind: str) -> None:
    ids, begins = [104, 0xC3, 0xA9, EOS], Beginning(prompt_token_ids=[7, 8])
    fields = {"return_token_ids": True}
    answer = answered(writer(bytewise, kind, fields, beginning=begins), ids)
    choice = answer["choices"][0]
    assert choice["token_ids"] == ids
    assert (answer if kind == "chat" else choice)["prompt_token_ids"] == [7, 8]
    chunks = answered(writer(bytewise, kind, fields | {"stream": True}, beginning=begins), ids)
    said = choices_of(chunks)
    assert [token for c in said for token in c.get("token_ids", [])] == ids
    prompts = [c["prompt_token_ids"] for c in (*chunks, *said) if "prompt_token_ids" in c]
    assert prompts == [[7, 8]]


def test_parts_are_joined_with_their_own_indices_and_summed_usage(bytewise: Tokenizer) -> None:
    bodies = []
    for part in range(2):
        w = writer(bytewise, "completion", {"n": 2}, part=True, first_index=2 * part)
        for choice in (1, 0):
            w.tokens(choice, [65 + 2 * part + choice])
            w.end(choice, Finish.STOP)
        bodies.append(w.close())
    summed = summed_usage([(5, 2, 4, 0), (5, 2, 4, 1)])
    answer = json.loads(joined_body(bodies, summed))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate("ABCD"))
    wanted = usage(10, 4, 8)
    wanted["prompt_tokens_details"]["cache_write_tokens"] = 1
    assert answer["usage"] == wanted
    streamed = writer(bytewise, "completion", USAGE_OPTIONS, part=True)
    assert b"[DONE]" not in feed(streamed, [65]) + finish(streamed)
    end = joined_end(summed, "id-1", 7, "m", include_usage=True)
    assert end.endswith(b"data: [DONE]\n\n")
    assert chunks_of(end)[0]["usage"] == answer["usage"]


_IDS = st.lists(
    st.one_of(st.sampled_from([*b"abEND \n", 0xC3, 0xA9, EOS]), st.integers(0, 299)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=200)
@example(
    ids=[[97]], cuts=[1, 0, 0], kind="completion", stream=False, stop=[], logprobs=True,
    extra={"echo": True},
)  # fmt: skip
@given(
    ids=st.lists(_IDS, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    kind=st.sampled_from(["chat", "completion"]),
    stream=st.booleans(),
    stop=st.sampled_from([[], ["END"], ["ab", "\n\n", "é"]]),
    logprobs=st.booleans(),
    extra=st.sampled_from(
        [{}, {"return_token_ids": True}, {"echo": True}, {"min_tokens": 3}, USAGE_IN_CHUNKS]
    ),
)
def test_each_choice_continues_where_another_node_left_it(
    bytewise: Tokenizer,
    ids: list[list[int]],
    cuts: list[int],
    kind: str,
    stream: bool,
    stop: list[str],
    logprobs: bool,
    extra: dict[str, Any],
) -> None:
    if extra is USAGE_IN_CHUNKS:
        del ids[1:]  # it counts the tokens of all choices, and these come in another order here
    fields = {"stop": stop, "stream": stream, "n": len(ids), **extra}
    fields |= with_logprobs(kind) if logprobs else {}
    begins = Beginning(
        echo="said" if "echo" in extra and kind == "completion" else "",
        prompt_token_ids=[7] if "return_token_ids" in extra else UNSET,
        scored_prompt=ScoredPrompt([7, 65, 66], lps([65, 66])),
    )

    def scored(so_far: list[ChoiceSoFar] | None = None) -> AnswerWriter:
        return writer(bytewise, kind, fields, so_far, beginning=begins)

    alone, first = scored(), scored()
    wanted = [feed(alone, own, c) + alone.end(c, Finish.LENGTH) for c, own in enumerate(ids)]
    got, so_far = [], []
    for c, own in enumerate(ids):
        sent, choice = feed(first, own[: cuts[c]], c), first.choices[c]
        over = Finish.LENGTH if cuts[c] >= len(own) else None
        sent += first.end(c, over) if over else b""
        got.append(sent)
        known = choice.token_ids
        sent_text = choice.sent_text if known else None
        so_far.append(
            ChoiceSoFar(generated=known, sent_text=sent_text, logprobs=lps(known), finish=over)
        )
    second = scored(so_far)
    for c, own in enumerate(ids):
        choice = second.choices[c]
        assert choice.ended == (so_far[c].finish is not None)
        assert (choice.stopped, choice.sent_text) == (
            first.choices[c].stopped,
            first.choices[c].sent_text,
        )
        if not choice.ended:
            got[c] += feed(second, own[cuts[c] :], c) + second.end(c, Finish.LENGTH)
        assert choice.token_ids == alone.choices[c].token_ids
    assert got == wanted
    assert second.close() == alone.close()
