"""Streams of text: nothing uncertain is sent, nothing is lost, and equal ids make equal states."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.tokenizer import TextStream, Tokenizer


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push(token) for token in ids]


def text_of(stream: TextStream, ids: list[int]) -> str:
    return "".join(pieces(stream, ids)) + stream.finish()


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 310), max_size=60))
def test_a_stream_is_the_text_of_the_whole_for_any_ids(bytewise: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(bytewise)
    text = text_of(stream, ids)
    assert text == bytewise.decode(ids)
    assert stream.sent == stream.decoded == len(text)


def test_a_character_is_sent_when_it_is_whole(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("é😀!", False)
    assert pieces(TextStream(bytewise), ids) == ["", "é", "", "", "", "😀", "!"]


def test_special_tokens_have_text_only_if_asked(bytewise: Tokenizer) -> None:
    assert text_of(TextStream(bytewise), [65, 2, 66]) == "AB"
    assert text_of(TextStream(bytewise, skip_special_tokens=False), [65, 2, 66]) == "A<|end2|>B"


def test_only_what_may_become_a_stop_string_is_held_back(bytewise: Tokenizer) -> None:
    stream = TextStream(bytewise, ("END",))
    assert pieces(stream, bytewise.encode("aENbEN", False)) == ["a", "", "", "ENb", "", ""]
    assert stream.decoded == 6
    assert stream.sent == 4
    assert stream.finish() == "EN"


def test_no_stop_string_is_found_within_min_tokens(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("xxaxb", False)
    stream = TextStream(bytewise, ("x",), min_tokens=2)
    assert pieces(stream, ids) == ["x", "x", "a", "", ""]
    assert stream.stop_hit == "x"


@settings(max_examples=200)
@given(
    text=st.text("abé😀", max_size=30),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_the_text_never_holds_a_stop_string_and_ends_at_the_first(
    bytewise: Tokenizer, text: str, stop: list[str]
) -> None:
    ids = bytewise.encode(text, False)
    stream, included = (
        TextStream(bytewise, tuple(stop), include_stop=each) for each in (False, True)
    )
    got = text_of(stream, ids)
    assert stream.sent == len(got)
    assert text_of(included, ids) == got + (stream.stop_hit or "")
    assert not any(found in got for found in stop)
    assert text.startswith(got)
    ends = [(text.find(found) + len(found), text.find(found)) for found in stop if found in text]
    assert got == (text[: min(ends)[1]] if ends else text)
    assert (stream.stop_hit is not None) == bool(ends)
