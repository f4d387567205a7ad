"""The end of a JSON value, found as it comes: the same verdict as the library's, wherever it is
cut.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.call_reader import ArgumentsReader, CallReader, JsonValue


def fed(text: str, step: int) -> tuple[bool, bool, int]:
    """(done, failed, characters taken), fed so many characters at a time."""
    value, taken = JsonValue(), 0
    for i in range(0, len(text), step):
        piece = text[i : i + step]
        end = value.feed(piece)
        taken += end
        if end < len(piece):
            break
    return value.done, value.failed, taken


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, -0.5, 2e+7]}',
        "[]",
        "[ ]",
        "{ }",
        '"x\\"\\u00e9\\n"',
        "[true,false,null]",
        '[[[]],{"":""}]',
        "12 ",
    ],
)
def test_values_end_where_they_end(text: str) -> None:
    length = len(text.rstrip())
    for step in (1, 2, 3, 100):
        assert fed(text + "?]", step) == (True, False, length)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[1,]", 3), ("[,1]", 1), ('{"a",1}', 4), ("{1:2}", 1), ('{"a":1,}', 7), ('["\\x"]', 3), ('["\\u00g0"]', 6),
        ("[01]", 3), ("[1.]", 3), ("[-]", 2), ("[1 2]", 3), ("[tru]", 4), ("[}", 1), ('{"a":1]', 6), ("]", 0), ("x", 0),
        ("[NaN]", 1), ('{"a" "b"}', 5), ("['a']", 1),
    ],
)  # fmt: skip
def test_faults_are_found_at_their_first_character(text: str, fault: int) -> None:
    for step in (1, 2, 100):
        assert fed(text, step) == (False, True, fault)


def test_line_breaks_in_strings_are_let_through() -> None:
    assert fed('["a\n\tb"]', 1) == (True, False, 8)


@settings(max_examples=500)
@given(text=st.text('{}[]",:\\ 0-1.e5atrufnlsu\n', max_size=14), step=st.integers(1, 4))
def test_it_accepts_what_the_library_accepts(text: str, step: int) -> None:
    done, failed, taken = fed(text + " ", step)  # the space ends a number
    try:
        json.loads(text, strict=False)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == (done and not failed and not text[taken:].strip())


@pytest.mark.parametrize(
    "text", ['{"arguments": {}, "name": "f"}', '{"name": "f", "arguments": {}}']
)
@pytest.mark.parametrize("step", [1, 5, 100])
def test_name_and_arguments_may_come_in_any_order(text: str, step: int) -> None:
    reader = CallReader(may_lack_arguments=False)
    for i in range(0, len(text), step):
        assert not reader.done
        assert reader.feed(text[i : i + step]) == len(text[i : i + step])
    assert (reader.name, reader.begun, reader.done, reader.failed) == ("f", True, True, False)
    assert reader.drain() == "{}"
    assert reader.drain() == ""


def test_the_first_of_two_arguments_counts() -> None:
    reader = CallReader(may_lack_arguments=False)
    reader.feed('{"name": "f", "parameters": {"a": 1}, "arguments": {"b": 2}, "name": "g"}')
    assert (reader.name, reader.drain(), reader.done) == ("f", '{"a": 1}', True)


def test_a_deep_value_is_read_without_recursion() -> None:
    reader = ArgumentsReader("f")
    text = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert reader.feed(text + "!") == len(text)
    assert reader.done
