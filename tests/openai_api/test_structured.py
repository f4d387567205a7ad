"""Which constraint a request asks for, and which askings are refused; tokens of bad words."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from kvrelay.openai_api.body import decode_chat, sampling_params
from kvrelay.openai_api.constraints import bad_word_ids, constraint_of
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import ChatRequest
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import Constraint

SCHEMA = {"type": "object", "properties": {"ö": {"type": "string"}, "a": {"type": "integer"}}}


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(
        json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        ).encode()
    )


def asked(**fields: Any) -> Constraint | None:
    return constraint_of(chat(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_fallback": True}},
    ],
)
def test_most_requests_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_json_schemas_keep_the_order_of_their_properties() -> None:
    formats: list[dict[str, Any]] = [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ]
    for fields in formats:
        found = asked(**fields)
        assert found is not None
        assert found.kind == "json"
        assert json.loads(found.text) == SCHEMA
        assert found.text.index("ö" if "ö" in found.text else "\\u00f6") < found.text.index('"a"')
        assert found.field.startswith(next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}'),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["ja"]}}, "choice", '["ja"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ],
)
def test_every_kind_by_each_of_its_names(fields: dict[str, Any], kind: str, text: str) -> None:
    found = asked(**fields)
    assert found is not None
    assert (found.kind, found.text, found.whitespace) == (kind, text, None)


def test_white_space_goes_with_json() -> None:
    found = asked(structured_outputs={"json": {}, "whitespace_pattern": "[\n ]*"})
    assert found is not None
    assert found.whitespace == "[\n ]*"
    compact = asked(structured_outputs={"json": {}, "disable_any_whitespace": True})
    assert compact is not None
    assert compact.whitespace == ""


@pytest.mark.parametrize(
    ("asked_format", "param", "words"),
    [
        ({"type": "yaml"}, "response_format.type", '"yaml"'),
        ({"type": "json_schema"}, "response_format.json_schema", "needs json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema",
            "needs",
        ),
    ],
)
def test_a_format_that_is_none_is_refused(
    asked_format: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        asked(response_format=asked_format)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("last", "outputs", "words"),
    [
        ("regex", {"regex": "a", "json": {}}, "at once"),
        ("regex", {"regex": ""}, "at least 1 character"),
        ("xml", {"xml": "a"}, "structured_outputs.xml is unknown"),
        ("x" * 80, {"x" * 5_000_000: 1}, "^structured_outputs.x{80} is unknown; leave it out$"),
        ("structural_tag", {"structural_tag": "{}"}, "send json, regex, choice"),
        ("choice", {"choice": []}, "at least 1 entry"),
        ("json", {"json": 3}, "wrong type"),
        ("regex", {"regex": "a", "whitespace_pattern": " "}, "goes with json"),
        ("regex", {"regex": "a" * 4097}, "4097 characters; the limit is 4096"),
        ("grammar", {"grammar": "#" * 32_769}, "the limit is 32768"),
        ("choice", {"choice": ["a" * 65_536]}, "the limit is 65536"),
        ("json", {"json": {"const": "a" * 65_536}}, "the limit is 65536"),
        ("json", {"json": {}, "whitespace_pattern": " " * 129}, "whitespace.* limit is 128"),
        ("regex", {"regex": "(" * 65 + ")" * 65}, "65 levels of brackets; the limit is 64"),
        ("json", {"json": "[" * 65 + "]" * 65}, "65 levels of brackets"),
        ("json", {"json": {"anyOf": [{"$ref": "#"}] * 401}}, "401 rules or references; the limit"),
        ("grammar", {"grammar": "a: b\n" * 401}, "401 rules or references"),
        ("grammar", {"grammar": 'a ::= ":" b\n' * 401}, "401 rules or references"),
    ],
)
def test_what_is_no_constraint_is_refused(last: str, outputs: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        asked(structured_outputs=outputs)
    assert (refused.value.status, refused.value.param) == (400, f"structured_outputs.{last}")


def test_a_format_and_an_output_at_once_are_refused() -> None:
    with pytest.raises(RequestError, match="at once"):
        asked(response_format={"type": "json_object"}, structured_outputs={"json": {}})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", json.dumps({"const": "[" * 100})),
        ("regex", "[(]" * 100),
        ("regex", "[])]" * 100),
        ("regex", "[[:alpha:]]" * 100),
        ("regex", r"\(" * 100),
        ("grammar", 'start: "(" ' + r"/[(]\(/ " * 100),
        ("grammar", 'start: a // "((\n' * 100),
        ("grammar", "start: a # /((\n" * 100),
        ("grammar", "start: " + '<"((> ' * 100),
        ("grammar", "root ::= " + '[(] "(" ' * 100),
        ("grammar", 'root ::= "a" # "((\n' * 100),
    ],
)
def test_brackets_in_texts_classes_and_comments_have_no_depth(kind: Any, text: str) -> None:
    Constraint(kind, text).check()


DEEP, END = "(" * 65, ")" * 65


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "([[:alpha:]]" * 65 + END),
        ("regex", "([[a])]" * 65 + END),
        ("regex", "([])]" * 65 + END),
        ("regex", "[" * 65 + "a" + "]" * 65),
        ("regex", f"(?x)#[\n{DEEP}a{END}#]\n"),
        ("grammar", f'start: /"{DEEP}a{END}"/'),
        ("grammar", f'start: /"/ {DEEP}"a"{END}'),
        ("grammar", rf'start: /\/"/ {DEEP}"a"{END}'),
        ("grammar", f'start: /[/ {DEEP}"a"{END} /]/'),
        ("grammar", f"start: /#[\n{DEEP}a{END}#]\n/ix"),
        ("grammar", 'start: a // "\na: ' + DEEP + '"a"' + END),
        ("grammar", 'start: a # "\na: ' + DEEP + '"a"' + END),
        ("grammar", f'start: <"> {DEEP}"a"{END}'),
        ("grammar", "start: " + r"( /\)/ " * 65 + END),
        ("grammar", "start: " + "( /)/ " * 65 + END),
        ("grammar", f'root ::= [^"] {DEEP}"a"{END}'),
        ("grammar", f'root ::= "/" {DEEP}"a"{END} "/"'),
        ("grammar", "root ::= " + "( [)] " * 65 + END),
        ("grammar", 'root ::= a # "\na ::= ' + DEEP + '"a"' + END),
    ],
)
def test_nothing_hides_levels_of_brackets(kind: Any, text: str) -> None:
    with pytest.raises(RequestError, match="levels of brackets; the limit is 64"):
        Constraint(kind, text).check()


@pytest.mark.parametrize(
    "unit", ['"', "\\", "[", '"\\"', "[\\]", "\n", " ", "/", "/\\/", "<", "(?", "/a", "x/"]
)
def test_limits_are_checked_in_linear_time(unit: str) -> None:
    """A quadratic pattern would take seconds of CPU time for these."""
    began = time.process_time()
    for kind, start, length in (
        ("json", "", 32_000),
        ("grammar", "", 32_000),
        ("grammar", "a::=", 32_000),
        ("regex", "", 4_000),
    ):
        with contextlib.suppress(RequestError):
            Constraint(kind, start + unit * (length // len(unit))).check()  # type: ignore[arg-type]
    assert time.process_time() - began < 1


def test_parameters_carry_it_and_check_the_lists() -> None:
    def params(bad_words: tuple[tuple[int, ...], ...] = (), **fields: Any) -> Any:
        limits = {"limit": 45, "vocab_size": 300, "default_seed": 1}
        return sampling_params(chat(**fields), **limits, bad_words=bad_words)

    full = params(((1, 2),), structured_outputs={"regex": "a"}, allowed_token_ids=[7, 8, 7])
    assert full.constraint == Constraint("regex", "a", field="structured_outputs.regex")
    assert (full.allowed_token_ids, full.bad_words) == ((7, 8), ((1, 2),))
    for words in (((1,) * 1025,), ((1, 300),)):
        with pytest.raises(RequestError) as refused:
            params(words)
        assert refused.value.param == "bad_words"


def test_bad_words_are_meant_at_the_beginning_and_behind_a_space(bytewise: Tokenizer) -> None:
    def encode(word: str) -> list[int]:
        return bytewise.encode(word, False)

    assert bad_word_ids(None, encode) == bad_word_ids([], encode) == ()
    assert bad_word_ids(["ab", " ab", "é"], encode) == (
        (97, 98),
        (32, 97, 98),
        (0xC3, 0xA9),
        (32, 0xC3, 0xA9),
    )
    for word in ("", "  "):
        with pytest.raises(RequestError, match="bad_words") as refused:
            bad_word_ids([word], encode)
        assert refused.value.param == "bad_words"
