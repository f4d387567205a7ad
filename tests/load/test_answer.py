"""What is read of an answer, and every way in which one is no good."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.client import AnswerReader
from kvrelay.load.measures import Failure, Record

DONE = b"data: [DONE]\n\n"


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def text(word: str | None, finish: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": word, "finish_reason": finish}], **more)


def delta(finish: str | None = None, **said: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": said, "finish_reason": finish}], usage=None)


def usage(tokens: int, cached: int | None = None) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    return event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": tokens, **details})


def read(*parts: bytes, asked: int = 2, exact: bool = True) -> tuple[Record, str]:
    """Return the record and the text of an answer whose parts come a second after each other."""
    answer = AnswerReader(Record(0, 0, 0.0, 0.0, asked_tokens=asked), keep_text=True)
    for at, part in enumerate(parts, 1):
        for line in part.splitlines(keepends=True):
            answer.read_line(line, float(at))
    answer.finish(exact=exact)
    return answer.record, answer.text


def test_a_completion() -> None:
    record, said = read(text("a"), text("b"), text("", "length"), usage(2, cached=4), DONE)
    assert (record.failure, said) == ("", "ab")
    assert (record.first_s, record.last_s, record.gaps_s) == (1.0, 2.0, [1.0])
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (2, 9, 4)
    assert (record.chunks, record.usage) == (2, True)


def test_a_chat_begins_with_its_first_token_and_not_with_its_role() -> None:
    record, said = read(
        b": alive\r\n\r\n",
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="x"),
        delta("stop"),
        usage(2),
        DONE,
    )
    assert (record.failure, said) == ("", "x")
    assert (record.first_s, record.last_s) == (3.0, 4.0)


def test_chunks_of_several_tokens_are_counted_by_their_usage() -> None:
    told = [{"prompt_tokens": 9, "completion_tokens": count} for count in (3, 5)]
    parts = text("abc", usage=told[0]), text("de", "length", usage=told[1]), DONE
    record, _ = read(*parts, asked=5)
    assert (record.failure, record.output_tokens, record.chunks) == ("", 5, 2)


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ([text("a", "stop"), usage(1), DONE], ""),  # the model may end it
        ([text("a"), event(error={"message": "out of memory", "code": 500})], Failure.IN_BAND),
        ([event(object="error", message="old servers say it so")], Failure.IN_BAND),
        ([text("a"), usage(1)], Failure.EARLY_END),
        ([text("a"), DONE], Failure.EARLY_END),
        ([text("a", "length"), usage(2)], Failure.EARLY_END),
        ([], Failure.EARLY_END),
        ([text("", "stop"), usage(0), DONE], Failure.EMPTY),
        ([text("a", "stop"), usage(1), DONE], Failure.SHORT),
        ([b"data: {nonsense\n\n", DONE], Failure.MALFORMED),
    ],
)
def test_what_is_no_answer(parts: list[bytes], failure: str) -> None:
    assert read(*parts, exact=failure != "")[0].failure == failure


@given(said=st.binary(max_size=300))
def test_no_bytes_raise(said: bytes) -> None:
    read(b"data: " + said, DONE)
