"""Calls in generated text: every format, wherever it is cut; what is no call stays text."""

# ruff: noqa: RUF001 - DeepSeek's markers are written with these characters

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.message_parts import Part, merged
from kvrelay.openai_api.model_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Opening,
    ReasoningFormat,
)
from kvrelay.openai_api.tool_parsers import CallParser, NamedParser, TextParser

TYPES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "units": {"type": ["string", "null"]},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": TYPES}}}]


def parser(name: str, hidden: tuple[str, ...] = (), *begins: Any) -> CallParser:
    return CallParser(hidden, TOOLS, TOOL_FORMATS[name], *begins)


def parse(parser: TextParser, pieces: list[str]) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return merged([*parts, *parser.finish()])


def message(
    name: str, text: str, hidden: tuple[str, ...] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]), by characters; the calls must be numbered and in order."""
    content, calls = "", []
    for part in parse(parser(name, hidden), list(text)):
        if part.kind == "content":
            content += part.text
        elif part.kind == "call":
            assert part.at == len(calls)
            calls.append((part.text, ""))
        else:
            assert part.at == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, calls


HARD = (
    '{"q": "a \\"}{]\\\\", "é": ["😀", {"x": -1.5e3, "y": null}], "code": "<tool_call>{\\n\\u00e9"}'
)
"""Arguments with what could confuse: quotes, brackets and markers in strings, nesting, escapes."""

_DEEPSEEK = "<｜tool▁calls▁begin｜>" + "\n".join(
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
    for name, text in (("f", HARD), ("g", "{}"))
)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # Hermes and Qwen
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
        (
            "mistral",
            '[TOOL_CALLS][{"name":"f","arguments":{}}][TOOL_CALLS][{"name":"g","arguments":{}}]',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "mistral",
            "[TOOL_CALLS]f{}[TOOL_CALLS]g[CALL_ID]x1y2z3abc[ARGS]{}",
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        # Qwen's coders: texts as the schema says, other values as JSON or Python
        (
            "qwen3_coder",
            'Hm.\n<tool_call>\n<function=f>\n<parameter=city>\na "b"\n\n<c> \n</parameter>\n'
            "<parameter=days>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
            "<parameter=tags>\n['x', True]\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "Hm.",
            [
                (
                    "f",
                    '{"city": "a \\"b\\"\\n\\n<c> ", "days": 3, "units": null, "tags": ["x", true]}',
                ),
                ("now", "{}"),
            ],
        ),
        ("qwen3_xml", "<function=now>\n</function>", "", [("now", "{}")]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=city>\nPar\n</par",
            "",
            [("f", '{"city": "Par')],
        ),
        # Text behind calls
        ("mistral", '[TOOL_CALLS]f{"a": "1"} Then text.', "Then text.", [("f", '{"a": "1"}')]),
        (
            "mistral",
            "[TOOL_CALLS]f{}[TOOL_CALLS]g then",
            "[TOOL_CALLS]g then",
            [("f", "{}")],
        ),
        ("qwen3_coder", "<function=f></function>\nend text", "end text", [("f", "{}")]),
        (
            "qwen3_coder",
            "<tool_call><function=f></function> note </tool_call>",
            "note",
            [("f", "{}")],
        ),
        ("qwen3_coder", "<tool_call><function=f></function>\n</tool_c", "", [("f", "{}")]),
        # DeepSeek's older form
        (
            "deepseek_v3",
            f"Hm.\n{_DEEPSEEK}<｜tool▁calls▁end｜>",
            "Hm.",
            [("f", HARD), ("g", "{}")],
        ),
        # Plain JSON
        (
            "json",
            ' [{"name": "f", "parameters": {"a": 1}}, {"arguments": {}, "name": "g"}]\n',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
    ],
)
def test_calls_are_found(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert message(name, text) == (content, calls)
    whole = parse(parser(name), [text])
    assert "".join(part.text for part in whole if part.kind == "content") == content


def test_text_behind_a_call_does_not_wait() -> None:
    mistral = parser("mistral")
    mistral.push("[TOOL_CALLS]f{}")
    assert mistral.push(" So") == [Part("content", "So")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>f()</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1e400}, "name": "f"}</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", "  <tool_cal \n"),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", "a < b </tool_call> c"),
        ("llama3_json", '{"a": 1}; {"name": "f", "parameters": {}}'),
        ("llama3_json", 'So: {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>print("x")'),
        ("mistral", "[TOOL_CALLS] I would call f {"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS][TOOL_CALLS]"),
        ("json", '[{"name": "f"}]'),
        ("json", '{"name": "f", "arguments": [1]}'),
        ("json", 'x {"name": "f", "arguments": {}}'),
        ("json", " \n"),
        ("qwen3_coder", "<tool_call>I think so</tool_call>"),
        ("qwen3_coder", f"<tool_call><function=f><parameter={'k' * 400}"),
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    assert message(name, text) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
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
    name: str, text: str, content: str, arguments: str
) -> None:
    assert message(name, text) == (content, [("f", arguments)])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("json", '{"name": "f", "arguments": {"a": 1}, "id": "call_1', '{"a": 1}'),
        ("json", '{"name": "f", "arguments": {"a": 1}, "i', '{"a": 1}'),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}, "type": "func', "{}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": [{"a": nul', "{}"),
    ],
)
def test_the_rest_of_a_call_that_is_cut_off_is_no_content(
    name: str, text: str, arguments: str
) -> None:
    assert message(name, text) == ("", [("f", arguments)])


def test_members_before_the_name_may_be_long_texts() -> None:
    text = f'<tool_call>{{"type": "function", "thought": "{"x" * 3000}", "name": "f", "arguments": {{}}}}'
    assert message("hermes", text) == ("", [("f", "{}")])
    for member in ('"id": -1.5e3', '"id": null', '"id": "x"'):
        text = f'<tool_call>{{"a": 1, "name": "f", {member}, "arguments": {{"a": "{"x" * 5000}"}}}}'
        assert message("hermes", text)[1] == [("f", f'{{"a": "{"x" * 5000}"}}')]
    late = f'<tool_call>{{"arguments": {{"a": "{"x" * 5000}"}}, "name": "f"}}'
    assert message("hermes", late) == (late, [])
    assert parse(parser("hermes"), [late]) == [Part("content", late)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>'),
        ("qwen3_coder", '<function=f><parameter=a>["\\ud800"]</parameter></function>'),
    ],
)
def test_half_a_surrogate_pair_can_be_sent(name: str, text: str) -> None:
    (_, [(_, arguments)]) = message(name, text)
    assert "\\ud800" in arguments
    arguments.encode()


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
    hermes = parser("hermes")
    assert hermes.push('<tool_call>{"name": "f", "arg') == []
    assert hermes.push('uments": {"a') == [Part("call", "f"), Part("arguments", '{"a')]
    assert hermes.push('": 1') == [Part("arguments", '": 1')]
    assert hermes.push("}}</tool_call>") == [Part("arguments", "}")]
    assert hermes.finish() == []
    coder = parser("qwen3_coder")
    coder.push("<tool_call>\n<function=f>\n<parameter=city>\nPa")
    assert coder.push('r"\nx') == [Part("arguments", 'r\\"\\nx')]


def test_the_named_call_is_all_of_the_text() -> None:
    told = [Part("call", "f"), Part("arguments", '{"a": 1}')]
    assert parse(NamedParser("f"), ['{"a"', "", ": 1}"]) == told
    assert parse(NamedParser("f"), []) == []


_SHREDS = [
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{", "}", "[",
    "]", '"name"', '"arguments"', '"parameters"', ":", ",", ";", '"f"', "f", "{}", ' {"name": ' '"f", "arguments": {',
    '"a": 1', '{"name": "g", "parameters": {}}', "\\", '"', " ", "\n", "1", "-", "true", "nul", "é", "<", "x", "f>",
    "[f(", "<function=", "<parameter=city>", "<parameter=a>", "</parameter>", "</function>",
]  # fmt: skip
_CALLS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=city>\na\n</parameter>\n<parameter=b>\n[1]"
    "\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS]f[CALL_ID]a[ARGS]{"a": "b", "c": [1, {"d": null}]}',
}
_CALL = '{"name": "f", "arguments": {"a": "b\\n", "c": [1, {"d": null}], "e": true}}'


@settings(max_examples=600)
@given(
    name=st.sampled_from(list(TOOL_FORMATS)),
    data=st.data(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    hides=st.booleans(),
    thinks=st.sampled_from([None, *REASONING_FORMATS.values()]),
    begins=st.sampled_from(Opening),
)
def test_where_the_text_is_cut_makes_no_difference(
    name: str,
    data: st.DataObject,
    cuts: list[int],
    hides: bool,
    thinks: ReasoningFormat | None,
    begins: Opening,
) -> None:
    row, marks = TOOL_FORMATS[name], thinks.markers if thinks else ()
    begins = begins if thinks else Opening.FREE
    call = _CALLS.get(name, "".join([*row.openers[:1], _CALL, *row.closers[:1]]))
    at = st.integers(0, len(call))
    pieces = at.map(lambda at: call[:at]) | at.map(lambda at: call[at:])
    shred = pieces | st.sampled_from([*_SHREDS, *row.markers, *marks, call])
    text = "".join(data.draw(st.lists(shred, max_size=8)))
    form = (row.markers + marks) * hides, thinks, begins
    whole = parse(parser(name, *form), [text])
    assert parse(parser(name, *form), list(text)) == whole
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parse(parser(name, *form), [text[a:b] for a, b in pairwise(places)]) == whole
    if not (hides or thinks or any(part.kind == "call" for part in whole)):
        assert whole == ([Part("content", text)] if text else [])


def test_deep_arguments_are_read_without_recursion_and_the_first_of_two_count() -> None:
    deep = '{"a":' * 5_000 + "1" + "}" * 5_000
    assert message("mistral", f"[TOOL_CALLS]f{deep}") == ("", [("f", deep)])
    twice = '{"name": "f", "arguments": {"a": 1}, "parameters": {}, "name": "g"}'
    assert message("json", twice) == ("", [("f", '{"a": 1}')])
