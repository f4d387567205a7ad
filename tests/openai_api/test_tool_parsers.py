"""Calls in generated text: every format, wherever it is cut; what is no call stays text."""

from __future__ import annotations

from itertools import pairwise
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.call_reader import CallReader
from kvrelay.openai_api.message_parts import Arguments, CallBegun, CallIds, Content, Part, merged
from kvrelay.openai_api.model_formats import TOOL_FORMATS
from kvrelay.openai_api.tool_parsers import NamedParser, TextParser

IDS = CallIds("chatcmpl-1", 0)


def parse(parser: TextParser, pieces: list[str]) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return merged([*parts, *parser.finish()])


def message(
    name: str, text: str, hidden: tuple[str, ...] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]), by characters; the calls must be numbered and in order."""
    parts = parse(TOOL_FORMATS[name].reader(IDS, hidden, ()), list(text))
    content, calls = "", []
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, CallBegun):
            assert part.index == len(calls)
            assert part.id == IDS.id_of(part.index, part.name)
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, calls


HARD = (
    '{"q": "a \\"}{]\\\\", "é": ["😀", {"x": -1.5e3, "y": null}], "code": "<tool_call>{\\n\\u00e9"}'
)
"""Arguments with what could confuse: quotes, brackets and markers in strings, nesting, escapes."""


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        # Hermes and Qwen
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            "",
            [("get_weather", '{"city": "Paris"}')],
        ),
        (
            "hermes",
            "I look.\n\n<tool_call>\n"
            f'{{"name": "f", "arguments": {HARD}}}\n</tool_call>\n<tool_call>\n'
            '{"arguments": {}, "name": "g"}\n</tool_call>',
            "I look.",
            [("f", HARD), ("g", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        (
            "hermes",
            'a<tool_call>{"name":"f","arguments":{ } }</tool_call> b',
            "a b",
            [("f", "{ }")],
        ),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1', "", [("f", '{"a":1')]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool', "", [("f", "{}")]),
        # A closing marker that is missing, one that is of no call, a brace too many
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"g","arguments":{}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{"a":{}}}}</tool_call>',
            "}",
            [("f", '{"a":{}}')],
        ),
        (
            "hermes",
            '<tool_call>{"type": 1, "name": "f", "id": [{"name": 2}], "parameters": {}}',
            "",
            [("f", "{}")],
        ),
        # Llama 3
        ("llama3_json", '{"name": "f", "parameters": {"x": "1"}}', "", [("f", '{"x": "1"}')]),
        ("llama3_json", f'<|python_tag|>{{"name": "f", "parameters": {HARD}}}', "", [("f", HARD)]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": '
            '[1]}};{"name":"h","parameters":{}}',
            "",
            [("f", "{}"), ("g", '{"a": [1]}'), ("h", "{}")],
        ),
        (
            "llama3_json",
            'Sure. <|python_tag|>{"type":"function","name":"f","parameters":{}}',
            "Sure.",
            [("f", "{}")],
        ),
        # Mistral, before version 11 and since
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "f", "arguments": {HARD}}}, {{"name": "g", "arguments": '
            f"{{}}}}]",
            "",
            [("f", HARD), ("g", "{}")],
        ),
        (
            "mistral",
            f"Wait[TOOL_CALLS]f{HARD}[TOOL_CALLS]g{{}}",
            "Wait",
            [("f", HARD), ("g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        (
            "mistral",
            "[TOOL_CALLS]f{}[TOOL_CALLS]g[CALL_ID]x1y2z3abc[ARGS]{}",
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        # Plain JSON
        ("json", f'{{"name": "f", "arguments": {HARD}}}', "", [("f", HARD)]),
        (
            "json",
            ' [{"name": "f", "parameters": {"a": 1}}, {"arguments": {}, "name": "g"}]\n',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
    ],
)
def test_calls_are_found(
    parser: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert message(parser, text) == (content, calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>f()</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", }</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", "  <tool_cal \n"),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", "a < b </tool_call> c"),
        ("llama3_json", '{"a": 1}; {"name": "f", "parameters": {}}'),
        ("llama3_json", '{"name": "Ann", "age": 5}'),
        ("llama3_json", 'So: {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>print("x")'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] I would call f {"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS][TOOL_CALLS]"),
        ("json", '[{"name": "f"}]'),
        ("json", "[]"),
        ("json", '{"name": "f", "arguments": [1]}'),
        ("json", 'x {"name": "f", "arguments": {}}'),
        ("json", " \n"),
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(parser: str, text: str) -> None:
    assert message(parser, text) == (text, [])


@pytest.mark.parametrize(
    ("parser", "text", "content", "arguments"),
    [
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{"a": nope}}</tool_call>!',
            "ope}}!",
            '{"a": n',
        ),
        ("llama3_json", '{"name":"f","parameters":{"a" 1}} x', "x", '{"a" 1}'),
        ("mistral", "[TOOL_CALLS]f{'a': 1}", "'a': 1}", "{"),
        ("json", '{"name":"f","arguments":{}, oops', "oops", "{}"),
    ],
)
def test_a_call_that_breaks_later_keeps_what_was_told_and_the_rest_is_content(
    parser: str, text: str, content: str, arguments: str
) -> None:
    assert message(parser, text) == (content, [("f", arguments)])


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("json", '{"name": "f", "arguments": {"a": 1}, "id": "call_1', '{"a": 1}'),
        ("json", '{"name": "f", "arguments": {"a": 1}, "i', '{"a": 1}'),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}, "type": "func', "{}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": [{"a": nul', "{}"),
        ("granite", '<|tool_call|>[{"name":"f","arguments":{},"id":', "{}"),
    ],
)
def test_the_rest_of_a_call_that_is_cut_off_is_no_content(
    parser: str, text: str, arguments: str
) -> None:
    assert message(parser, text) == ("", [("f", arguments)])


@pytest.mark.parametrize("value", [f'"{"x" * 5000}"', f"[{'[],' * 2000}1]", "1" * 5000])
def test_members_before_the_arguments_may_be_long(value: str) -> None:
    text = f'<tool_call>{{"thought": {value}, "name": "f", "arguments": {{}}}}</tool_call>'
    assert message("hermes", text) == ("", [("f", "{}")])


class _CountedText(str):
    __slots__ = ("copied",)

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        found = super().__getitem__(at)
        self.copied = getattr(self, "copied", 0) + len(found)
        return found


@pytest.mark.parametrize("members", ['"a":' + "[1," * 1000, '"a":"' + "x" * 4000, '"a":1,' * 1000])
def test_the_members_of_a_call_are_read_once(members: str) -> None:
    text = "{" + members
    reader = CallReader(may_lack_arguments=False)
    assert all(reader.feed(char) == 1 for char in text), "it wants to see a character again"
    whole = _CountedText(text)
    assert CallReader(may_lack_arguments=False).feed(whole) == len(text)
    assert whole.copied <= 8 * len(text)


def test_a_malformed_call_before_a_good_one_hides_nothing() -> None:
    text = '<tool_call>{oops}</tool_call>\n<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert message("hermes", text) == ("<tool_call>{oops}</tool_call>", [("f", "{}")])


def test_markers_that_are_special_tokens_are_never_shown() -> None:
    hidden = ("<tool_call>", "</tool_call>")
    assert message("hermes", "a<tool_call>no</tool_call>b", hidden) == ("anob", [])
    assert message("hermes", "a</tool_call>b<tool_call>", hidden) == ("ab", [])
    assert message("mistral", "x[TOOL_CALLS]f[ARGS]y z", ("[TOOL_CALLS]", "[ARGS]")) == (
        "xfy z",
        [],
    )
    assert message("llama3_json", "<|python_tag|>print(1)", ("<|python_tag|>",)) == ("print(1)", [])


def test_white_space_between_words_and_calls() -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert message("hermes", f" \n{call}\n \n{call} ")[0] == ""
    assert message("hermes", f"a\n{call}\nb\n")[0] == "a\n\nb"
    assert message("hermes", f"\n{call}\n b\n")[0] == "b"
    assert message("hermes", " a \n")[0] == " a \n"


def test_arguments_are_told_as_they_come() -> None:
    parser = TOOL_FORMATS["hermes"].reader(IDS, (), ())
    assert parser.push('<tool_call>{"name": "f", "arg') == []
    assert parser.push('uments": {"a') == [
        CallBegun(0, IDS.id_of(0, "f"), "f"),
        Arguments(0, '{"a'),
    ]
    assert parser.push('": 1') == [Arguments(0, '": 1')]
    assert parser.push("}}</tool_call>") == [Arguments(0, "}")]
    assert parser.finish() == []


def test_the_named_call_is_all_of_the_text() -> None:
    assert parse(NamedParser(IDS, "f"), ['{"a"', "", ": 1}"]) == [
        CallBegun(0, IDS.id_of(0, "f"), "f"),
        Arguments(0, '{"a": 1}'),
    ]
    assert parse(NamedParser(IDS, "f"), []) == []


def test_ids_are_functions_of_the_answer_the_choice_and_the_index() -> None:
    told = {
        CallIds(answer, choice, form).id_of(index, "f")
        for answer in ("a", "b")
        for choice in (0, 1)
        for form in ("{short}", "call_{hex}")
        for index in (0, 1)
    }
    assert len(told) == 16
    short = CallIds("a", 0, "{short}")
    assert short.id_of(3, "f") == CallIds("a", 0, "{short}").id_of(3, "f")
    for index in range(100):
        assert len(short.id_of(index, "f")) == 9
        assert short.id_of(index, "f").isalnum()
        assert short.id_of(index, "f").isascii()
    assert (
        CallIds("a", 0, "functions.{name}:{index}", first=2).id_of(1, "f{x}") == "functions.f{x}:3"
    )


_SHREDS = [
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{", "}", "[",
    "]", '"name"', '"arguments"', '"parameters"', ":", ",", ";", '"f"', "f", "{}", ' {"name": ' '"f", "arguments": {',
    '"a": 1', '{"name": "g", "parameters": {}}', "\\", '"', " ", "\n", "1", "-", "true", "nul", "é", "<", "x",
]  # fmt: skip
_OTHER_SHREDS = [
    "f(",
    "a=",
    "'b'",
    ")",
    "```",
    "function",
    "f>",
    "f\n",
    "functions.f:0",
    "commentary to=functions.f ",
]
_OTHER_SHREDS += [
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]


@settings(max_examples=600)
@given(
    parser=st.sampled_from(list(TOOL_FORMATS)),
    data=st.data(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    hides=st.booleans(),
)
def test_where_the_text_is_cut_makes_no_difference(
    parser: str, data: st.DataObject, cuts: list[int], hides: bool
) -> None:
    row = TOOL_FORMATS[parser]
    call = row.write("f", {"a": "b\n", "c": [1, {"d": None}], "e": True})
    pieces = st.integers(0, len(call)).map(lambda at: call[:at]) | st.integers(0, len(call)).map(
        lambda at: call[at:]
    )
    shred = pieces | st.sampled_from([*_SHREDS, *_OTHER_SHREDS, *row.marks.markers, call])
    text = "".join(data.draw(st.lists(shred, max_size=8)))
    hidden = row.marks.markers if hides else ()
    whole = parse(row.reader(IDS, hidden, ()), [text])
    assert parse(row.reader(IDS, hidden, ()), list(text)) == whole
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parse(row.reader(IDS, hidden, ()), [text[a:b] for a, b in pairwise(places)]) == whole
    if not hides and not any(isinstance(part, CallBegun) for part in whole):
        assert whole == ([Content(text)] if text else [])


def test_deep_arguments_are_read_without_recursion_and_the_first_of_two_count() -> None:
    deep = '{"a":' * 5_000 + "1" + "}" * 5_000
    assert message("mistral", f"[TOOL_CALLS]f{deep}") == ("", [("f", deep)])
    twice = '{"name": "f", "arguments": {"a": 1}, "parameters": {}, "name": "g"}'
    assert message("json", twice) == ("", [("f", '{"a": 1}')])
