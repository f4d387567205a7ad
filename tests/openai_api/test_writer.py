"""Answers: their shapes, and that a hand-over at any token leaves no trace in the bytes."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.body import decode_chat, decode_completion, sampling_params
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import ChatChunk, ChatCompletion, Completion, CompletionChunk
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.errors import NodeFailed, RequestError
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

EOS = 2


class OneChoice:
    """A writer of answers with one choice, as its only choice sees it."""

    def __init__(self, answer: AnswerWriter) -> None:
        self.answer = answer
        self.choice = answer.choices[0]

    def tokens(self, ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> bytes:
        return self.answer.tokens(0, ids, logprobs)

    def end(self, finish: Finish, handover: KvTransferParams | None = None) -> bytes:
        return self.answer.end(0, finish) + self.answer.close(handover)

    @property
    def stopped(self) -> bool:
        return self.choice.stopped

    @property
    def sent_text(self) -> int:
        return self.choice.sent_text

    @property
    def token_ids(self) -> list[int]:
        return self.choice.token_ids


def writer(tokenizer: Tokenizer, kind: str, fields: dict[str, Any], **so_far: Any) -> OneChoice:
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
    head: dict[str, Any] = {
        "response_id": "id-1",
        "created": 7,
        "model": "m",
        "prompt_tokens": 5,
        "cached_tokens": 4,
    }
    return OneChoice(
        AnswerWriter(request, tokenizer, params, **head, so_far=[ChoiceSoFar(**so_far)])
    )


def logprobs_of(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, (token, 65), (-0.5, -1.25)) for token in ids]


def feed(w: OneChoice, ids: list[int]) -> bytes:
    """One token per update, as engines do; stops where the caller of a writer would."""
    payload = b""
    for token in ids:
        if w.stopped:
            break
        payload += w.tokens([token], logprobs_of([token]))
    return payload


def events(payload: bytes) -> list[Any]:
    """The JSON of each event; the stream must end with [DONE]."""
    lines = payload.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def text_in(kind: str, chunks: list[Any]) -> str:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(c["delta"].get("content", "") if kind == "chat" else c["text"] for c in choices)


def test_a_streamed_chat_has_role_text_finish_usage_and_done(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", {"stream": True, "stream_options": {"include_usage": True}})
    payload = feed(w, [*bytewise.encode("hé", False), EOS])
    chunks = events(payload + w.end(Finish.STOP))
    head = {"id": "id-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}

    def chunk(delta: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        return {
            **head,
            "choices": [
                {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
            ],
        }

    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert chunks == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "h"}),
        chunk({"content": "é"}),
        chunk({}, "stop", stop_reason=None),
        {**head, "choices": [], "usage": usage},
    ]


def test_a_streamed_completion_has_text_and_finish(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "completion", {"stream": True})
    chunks = events(feed(w, bytewise.encode("hé", False)) + w.end(Finish.LENGTH))
    head = {"id": "id-1", "object": "text_completion", "created": 7, "model": "m"}

    def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
        return {
            **head,
            "choices": [
                {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, **more}
            ],
        }

    assert chunks == [chunk("h"), chunk("é"), chunk("", "length", stop_reason=None)]


def test_whole_answers(bytewise: Tokenizer) -> None:
    ids = [*bytewise.encode("hé", False), EOS]
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    end = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    w = writer(bytewise, "chat", {})
    assert w.tokens(ids) == b""
    assert json.loads(w.end(Finish.STOP)) == {
        "id": "id-1", "object": "chat.completion", "created": 7, "model": "m", "usage": usage,
        "choices": [{**end, "message": {"role": "assistant", "content": "hé", "reasoning": None}}],
    }  # fmt: skip
    w = writer(bytewise, "completion", {})
    assert w.tokens(ids) == b""
    assert json.loads(w.end(Finish.STOP)) == {
        "id": "id-1", "object": "text_completion", "created": 7, "model": "m", "usage": usage,
        "choices": [{**end, "text": "hé"}],
    }  # fmt: skip


def test_answers_decode_into_their_own_types(bytewise: Tokenizer) -> None:
    for kind, chunk, whole in (
        ("chat", ChatChunk, ChatCompletion),
        ("completion", CompletionChunk, Completion),
    ):
        w = writer(bytewise, kind, {"stream": True})
        first = w.tokens([104]).partition(b"\n\n")[0].removeprefix(b"data: ")
        assert msgspec.json.decode(first, type=chunk).created == 7
        assert (
            msgspec.json.decode(
                writer(bytewise, kind, {}).end(Finish.STOP), type=whole
            ).usage.total_tokens
            == 5
        )


def test_a_stop_string_ends_the_answer_and_drops_what_follows(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", {"stream": True, "stop": ["END"]})
    payload = w.tokens(bytewise.encode("aENDbc", False))
    assert w.stopped
    assert w.token_ids == bytewise.encode("aEND", False)
    assert w.tokens([65]) == b""
    chunks = events(payload + w.end(Finish.ABORT))
    assert text_in("chat", chunks) == "a"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "END"
    whole = writer(bytewise, "chat", {"stop": "END", "include_stop_str_in_output": True})
    whole.tokens(bytewise.encode("aENDbc", False))
    answer = json.loads(whole.end(Finish.LENGTH))
    assert answer["choices"][0]["message"]["content"] == "aEND"
    assert answer["usage"]["completion_tokens"] == 4


def test_the_stop_reason_is_a_stop_token_that_the_request_named(bytewise: Tokenizer) -> None:
    for last, reason in ((66, 66), (EOS, None)):
        w = writer(bytewise, "completion", {"stop_token_ids": [66]})
        w.tokens([65, last])
        choice = json.loads(w.end(Finish.STOP))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    # Not special, so it stays in the text; at the token limit it did not end the answer.
    w = writer(bytewise, "completion", {"stop_token_ids": [66]})
    w.tokens([65, 66])
    choice = json.loads(w.end(Finish.LENGTH))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("AB", None)


def test_no_chunk_is_empty_and_only_the_usage_chunk_has_no_choices(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", {"stream": True})
    assert w.tokens([0xC3]).count(b"data: ") == 1  # the role
    assert w.tokens([]) == b""
    assert w.tokens([0xA9]).count(b"data: ") == 1
    assert all(chunk["choices"] for chunk in events(b"" + w.end(Finish.LENGTH)))


def test_usage_in_every_chunk(bytewise: Tokenizer) -> None:
    w = writer(
        bytewise, "completion", {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    )
    chunks = events(feed(w, [65, 66]) + w.end(Finish.LENGTH))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_logprobs_of_a_chat(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", {"logprobs": True, "top_logprobs": 2})
    w.tokens(
        [0xC3, EOS],
        [TokenLogprobs(0xC3, -0.5, (0xC3, 65), (-0.5, float("-inf"))), *logprobs_of([EOS])],
    )
    content = json.loads(w.end(Finish.STOP))["choices"][0]["logprobs"]["content"]
    half = {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]}
    assert content[0] == {
        **half,
        "top_logprobs": [half, {"token": "A", "logprob": -9999.0, "bytes": [65]}],
    }
    assert content[1]["token"] == "<|end2|>"


def test_logprobs_of_a_completion(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "completion", {"logprobs": 1})
    w.tokens(
        [104, 0xC3, 0xA9, 33],
        [TokenLogprobs(t, -0.5, (65,), (-0.25,)) for t in (104, 0xC3, 0xA9, 33)],
    )
    assert json.loads(w.end(Finish.STOP))["choices"][0]["logprobs"] == {
        "text_offset": [0, 1, 1, 2],
        "token_logprobs": [-0.5] * 4,
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "top_logprobs": [{t: -0.5, "A": -0.25} for t in ("h", "bytes:\\xc3", "bytes:\\xa9", "!")],
    }


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streamed_logprobs_are_those_of_the_whole_answer(bytewise: Tokenizer, kind: str) -> None:
    ids = [*bytewise.encode("aé😀b", False), EOS]
    fields: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    )
    w = writer(bytewise, kind, {**fields, "stream": True})
    chunks = events(feed(w, ids) + w.end(Finish.STOP))
    whole = writer(bytewise, kind, fields)
    whole.tokens(ids, logprobs_of(ids))
    wanted = json.loads(whole.end(Finish.STOP))["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    got = {name: [entry for part in parts if part for entry in part[name]] for name in wanted}
    assert got == wanted


def test_a_broken_answer_ends_with_an_error_and_done(bytewise: Tokenizer) -> None:
    error = NodeFailed("the node is gone")
    body = {
        "error": {"message": "the node is gone", "type": "node_failed", "param": None, "code": None}
    }
    assert events(writer(bytewise, "chat", {"stream": True}).answer.error(error)) == [body]
    assert json.loads(writer(bytewise, "chat", {}).answer.error(error)) == body


def test_a_whole_answer_of_a_prefill_leg_carries_the_hand_over(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "completion", {})
    w.tokens([65])
    answer = json.loads(
        w.end(Finish.LENGTH, KvTransferParams(do_remote_prefill=True, remote_port=5))
    )
    assert answer["kv_transfer_params"] == {"do_remote_prefill": True, "remote_port": 5}
    assert answer["choices"][0]["text"] == "A"


def test_missing_logprobs_of_a_hand_over_are_refused(bytewise: Tokenizer) -> None:
    with pytest.raises(RequestError, match="0 of 1 generated tokens"):
        writer(bytewise, "completion", {"logprobs": 1}, generated=[65])


_TOKENS = st.lists(
    st.one_of(st.sampled_from([*b"abEND \n", 0xC3, 0xA9, EOS]), st.integers(0, 299)), max_size=25
)


@settings(max_examples=150)
@given(
    ids=_TOKENS,
    cut=st.integers(0, 25),
    kind=st.sampled_from(["chat", "completion"]),
    stream=st.booleans(),
    stop=st.sampled_from([[], ["END"], ["ab", "\n\n", "é"]]),
    logprobs=st.booleans(),
    usage=st.sampled_from(
        [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
    ),
    min_tokens=st.sampled_from([0, 3]),
)
def test_a_hand_over_at_any_token_leaves_no_trace(
    bytewise: Tokenizer,
    ids: list[int],
    cut: int,
    kind: str,
    stream: bool,
    stop: list[str],
    logprobs: bool,
    usage: dict[str, bool],
    min_tokens: int,
) -> None:
    fields: dict[str, Any] = {"stop": stop, "stream": stream, "min_tokens": min_tokens}
    fields |= {"stream_options": usage} if stream else {}
    if logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    alone = writer(bytewise, kind, fields)
    wanted = feed(alone, ids) + alone.end(Finish.LENGTH)
    first = writer(bytewise, kind, fields)
    payload = feed(first, ids[:cut])
    known = {"generated": first.token_ids, "logprobs": logprobs_of(first.token_ids)}
    second = writer(
        bytewise, kind, fields, **known, sent_text=first.sent_text if first.token_ids else None
    )
    assert second.stopped == first.stopped
    assert second.sent_text == first.sent_text
    payload += feed(second, ids[cut:]) + second.end(Finish.LENGTH)
    assert payload == wanted
    assert second.token_ids == alone.token_ids


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("logprobs", [True, False])
def test_with_nothing_sent_yet_the_next_writer_sends_all(
    bytewise: Tokenizer, kind: str, logprobs: bool
) -> None:
    """A third-party proxy throws the prefill leg's answer away."""
    ids = bytewise.encode("hé!", False)
    fields: dict[str, Any] = {"stream": True}
    if logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    w = writer(
        bytewise, kind, fields, generated=ids[:3], logprobs=logprobs_of(ids[:3]), sent_text=None
    )
    assert w.sent_text == 0
    at_once = w.tokens([])
    assert b"h\xc3\xa9" in at_once
    assert w.sent_text == 2
    assert w.tokens([]) == b""
    chunks = events(at_once + feed(w, ids[3:]) + w.end(Finish.LENGTH))
    assert text_in(kind, chunks) == "hé!"
    if kind == "chat":
        assert [c["choices"][0]["delta"].get("role") for c in chunks] == [
            "assistant",
            None,
            None,
            None,
        ]
    if logprobs:
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert sum(
            len(part["content" if kind == "chat" else "tokens"]) for part in parts if part
        ) == len(ids)


def test_a_replay_with_nothing_to_follow_is_sent_at_the_end(bytewise: Tokenizer) -> None:
    w = writer(bytewise, "chat", {"stream": True, "stop": "b"}, generated=[97, 98], sent_text=None)
    assert w.stopped
    chunks = events(w.end(Finish.STOP))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
    ]
    assert chunks[-1]["choices"][0]["stop_reason"] == "b"


@pytest.mark.model
def test_a_token_costs_some_microseconds(smollm2: Tokenizer) -> None:
    """CPU time, for other tests share the cores. Measured 3 us at 2.5 GHz; the bound only catches
    another order.
    """
    ids = smollm2.encode("The quick brown fox jumps over the lazy dog. " * 100, False)
    w = writer(smollm2, "chat", {"stream": True, "stop": ["\n\n\n", "User:"]})
    for token in ids[:100]:
        w.tokens([token])
    began = time.process_time()
    for token in ids:
        w.tokens([token])
    assert (time.process_time() - began) / len(ids) < 60e-6
