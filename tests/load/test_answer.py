"""What is read of an answer, however its bytes are cut, and every way in which one is no good."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.client import Answer
from kvrelay.load.records import Failure, Record

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


def read(*parts: bytes, asked: int = 2, exact: bool = True, status: int = 200) -> Answer:
    """Parts that come a second after each other."""
    answer = Answer(keep=True)
    answer.status = status
    for at, part in enumerate(parts, 1):
        answer.feed(part, float(at))
    answer.end(asked, exact=exact)
    return answer


def test_a_completion() -> None:
    answer = read(text("a"), text("b"), text("", "length"), usage(2, cached=4), DONE)
    assert answer.failure is None
    assert (answer.first, answer.last, answer.gaps, answer.text) == (1.0, 2.0, [1.0], "ab")
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens, answer.counts) == (
        2,
        9,
        4,
        [1, 1],
    )


def test_a_chat_begins_with_its_first_token_and_not_with_its_role() -> None:
    answer = read(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="x"),
        delta("stop"),
        usage(2),
        DONE,
    )
    assert answer.failure is None
    assert (answer.first, answer.last, answer.text) == (2.0, 3.0, "x")


def test_tokens_without_text_are_tokens() -> None:
    answer = read(text(""), text("é"), text("", "length"), usage(2), DONE)
    assert (answer.first, answer.gaps) == (1.0, [1.0])


def test_chunks_of_several_tokens_are_counted_by_their_usage() -> None:
    def so_far(count: int) -> dict[str, int]:
        return {"prompt_tokens": 9, "completion_tokens": count}

    parts = (
        text("abc", usage=so_far(3)),
        text("", usage=so_far(3)),
        text("de", "length", usage=so_far(5)),
        DONE,
    )
    answer = read(*parts, asked=5)
    assert answer.failure is None
    assert (answer.counts, answer.gaps, answer.tokens) == ([3, 2], [2.0], 5)


def test_counts_that_do_not_add_up_are_not_told() -> None:
    record = Record(0, 0, 0.0, 0.0)
    read(text("ab"), text("c", "length"), usage(3), DONE).into(record, 0.0)
    assert (record.counts, record.chunks, record.output_tokens, record.usage) == ([], 2, 3, True)


def test_without_usage_chunks_are_counted() -> None:
    answer = read(text("a"), text("b", "stop"), DONE)
    assert (answer.failure, answer.tokens, answer.usage) == (None, 2, False)


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ([text("a"), event(error={"message": "out of memory", "code": 500})], Failure.IN_BAND),
        ([event(object="error", message="old servers say it so")], Failure.IN_BAND),
        ([text("a"), usage(1)], Failure.EARLY_END),
        ([text("a"), DONE], Failure.EARLY_END),
        ([text("a", "length"), usage(2)], Failure.EARLY_END),
        ([], Failure.EARLY_END),
        ([text("", "stop"), usage(0), DONE], Failure.EMPTY),
        ([text("a", "stop"), usage(1), DONE], Failure.SHORT),
        ([b"data: {nonsense\n\n", DONE], Failure.MALFORMED),
        ([b"data: " + b"x" * (1 << 21)], Failure.MALFORMED),
    ],
)
def test_what_is_no_answer(parts: list[bytes], failure: Failure) -> None:
    assert read(*parts).failure == failure


def test_an_answer_may_be_short_if_the_model_may_end_it() -> None:
    assert read(text("a", "stop"), usage(1), DONE, exact=False).failure is None


def test_a_status_is_told_with_its_body() -> None:
    answer = read(b'{"error": "no room"}', status=429)
    assert (answer.failure, answer.why) == (Failure.STATUS, '429: {"error": "no room"}')
    assert read(status=0).failure == Failure.EARLY_END


WHOLE = (
    delta(role="assistant", content="")
    + b": alive\n\n"
    + delta(content="é") * 3
    + delta("length")
    + usage(3)
    + DONE
)


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=30), crlf=st.booleans())
def test_bytes_may_be_cut_anywhere(cuts: list[int], crlf: bool) -> None:
    said = WHOLE.replace(b"\n", b"\r\n") if crlf else WHOLE
    ends = sorted({*cuts, 0, len(said)})
    answer = read(*(said[a:b] for a, b in itertools.pairwise(ends)), asked=3)
    assert (answer.failure, answer.tokens, answer.chunks, answer.text) == (None, 3, 3, "ééé")


@given(said=st.binary(max_size=300))
def test_no_bytes_raise(said: bytes) -> None:
    read(b"data: " + said, DONE)
