"""Reasoning apart from content, wherever it is cut, whoever opened it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.message_parts import Part, merged
from kvrelay.openai_api.model_formats import Opening, ReasoningFormat
from kvrelay.openai_api.tool_parsers import TextParser

THINK = ReasoningFormat()


def split(begins: Opening, pieces: list[str]) -> list[Part]:
    stream = TextParser((), THINK, begins)
    parts: list[Part] = []
    for piece in pieces:
        parts += stream.push(piece)
    return merged([*parts, *stream.finish()])


@pytest.mark.parametrize(
    ("begins", "text", "thought", "content"),
    [
        (Opening.FREE, "<think>\na\nb\n</think>\n\nc\n", "a\nb", "c\n"),
        (Opening.FREE, "\n<think>a</think>c", "a", "c"),
        (Opening.FREE, "c <think>a</think>", "", "c <think>a</think>"),
        (Opening.FREE, "<thin", "", "<thin"),
        (Opening.FREE, " c", "", " c"),
        (Opening.FREE, "<think>\n\n</think>\n\nc", "", "c"),
        (Opening.FREE, "", "", ""),
        (Opening.INSIDE, "\n a </thin k> </think> ", "a </thin k>", ""),
        # Some models open what the prompt has opened already.
        (Opening.INSIDE, "<think>\na</think>\nc", "a", "c"),
        # Without an end it is reasoning to the last character.
        (Opening.INSIDE, "a b\n", "a b", ""),
        (Opening.INSIDE, "a </thi", "a </thi", ""),
        (Opening.INSIDE, "<th", "<th", ""),
        (Opening.INSIDE, "a</think>b</think>c", "a", "b</think>c"),
        (Opening.BEHIND, "\n<think>a</think>", "", "\n<think>a</think>"),
    ],
)
def test_reasoning_and_content(begins: Opening, text: str, thought: str, content: str) -> None:
    both = (("reasoning", thought), ("content", content))
    wanted = [(kind, said, 0) for kind, said in both if said]
    assert split(begins, [text]) == split(begins, list(text)) == wanted


def test_reasoning_is_told_as_it_comes() -> None:
    stream = TextParser((), THINK, Opening.INSIDE)
    assert stream.push("one two ") == [Part("reasoning", "one two")]
    assert stream.push("three <") == [Part("reasoning", " three")]
    assert stream.push("/think>\n") == []
    assert stream.push("so") == [Part("content", "so")]


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ("<|im_start|>assistant\n", Opening.FREE),
        ("<|Assistant|><think>\n", Opening.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Opening.BEHIND),
        ("", Opening.FREE),
    ],
)
def test_the_prompts_end_says_how_the_answer_begins(end: str, wanted: Opening) -> None:
    assert THINK.opening(end) is wanted
    assert ReasoningFormat(assumed=True).opening(end) is (
        Opening.INSIDE if wanted is Opening.FREE else wanted
    )


@settings(max_examples=400)
@given(
    begins=st.sampled_from(Opening),
    shreds=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/think", ">", " ", "\n", "a", "é"]),
        max_size=10,
    ),
    cut=st.integers(0, 30),
)
def test_where_the_text_is_cut_makes_no_difference(
    begins: Opening, shreds: list[str], cut: int
) -> None:
    text = "".join(shreds)
    whole = split(begins, [text])
    assert split(begins, list(text)) == whole
    assert split(begins, [text[:cut], text[cut:]]) == whole
    # Markers leave a gap, so that what stood on both sides of one makes no other.
    told = "\0".join(part.text for part in whole)
    assert bare(told) == bare(text)


def bare(text: str) -> str:
    """Without white space and markers."""
    return (
        "".join(text.split()).replace("<think>", "\0").replace("</think>", "\0").replace("\0", "")
    )
