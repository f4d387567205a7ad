"""Grammars alone: what is compiled, refused, kept and timed, and which objects are closed."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np
import pytest
from grammar_doubles import EOS, JSON, TOKENS, VOCAB, Slow, regex
from scheduling import request

from kvrelay.machine import embedded_model
from kvrelay.node.compiling import grammars_for
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.paged_engine import grammar
from kvrelay.paged_engine.grammar import Grammars, TimedMatcher, closed
from kvrelay.paged_engine.guide import Guide
from kvrelay.paged_engine.request import Request
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import Constraint, SamplingParams


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENS, special_ids=[EOS], eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def vocabulary() -> Grammars:
    """Of a real model: common letters stand in many tokens."""
    tokenizer = load_tokenizer(str(embedded_model()))
    return grammars_for(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def guided_request(grammars: Grammars, constraint: Constraint) -> Request:
    params = SamplingParams(max_tokens=200, seed=3, constraint=constraint)
    own = request("r", list(range(3, 12)))
    own.guide = Guide(
        params,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        matcher=TimedMatcher(grammars.matcher(constraint)),
    )
    return own


def test_stalls_are_counted_and_errors_of_the_library_come_first(grammars):
    matcher = TimedMatcher(Slow(grammars.matcher(regex("[a-z]*")), 0.12))
    mask = np.zeros(VOCAB // 32, np.uint32)
    for expected in (False, False, True):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert matcher.is_error() is matcher.is_stopped() is expected
    wrong = TimedMatcher(grammars.matcher(regex("a")))
    assert not wrong.consume_tokens([ord("b")])
    assert wrong.is_error()
    assert wrong.get_error()


def test_rows_of_a_slow_step_are_timed_one_by_one_in_the_next(grammars, monkeypatch):
    """Together nobody knows whose time it was."""
    executed: list[int] = []

    class Executor:
        def unsafe_compute_mask_ptr(self, matchers, *_) -> None:
            executed.append(len(matchers))
            time.sleep(0.11)

    monkeypatch.setattr(grammar, "_executor", Executor)
    requests = [guided_request(grammars, regex("[a-z]*")) for _ in range(3)]
    for _ in range(grammar._WATCHED_STEPS + 2):
        assert grammar.row_masks(requests, VOCAB) is not None
    assert executed == [3, 3]


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("json", '{"type": "objekt"}'), "Invalid type: objekt"),
        (Constraint("json", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Constraint("json", '{"$ref": "#/nowhere"}'), "'/nowhere' does not exist"),
        (Constraint("json", "false"), "Unsatisfiable"),
        (Constraint("json", "{"), "Expecting"),
        (Constraint("json", "[1]"), "JSON schema"),
        (Constraint("json", "[" * 20000), "recursion"),
        (Constraint("json", "{}", whitespace="("), "unclosed group"),
        (regex("(a"), "unclosed group"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("(?=a)"), "look-around"),
        (Constraint("grammar", 'start: a\na: b "x"'), 'unknown name: "b"'),
        (Constraint("grammar", 'root ::= "a'), "GBNF"),
        (Constraint("grammar", "nonsense"), "Lark, or GBNF"),
        (Constraint("grammar", '%llguidance {}\nstart: "a"'), "leave out the line"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(constraint, reason, grammars):
    with pytest.raises(RequestError) as refused:
        grammars.matcher(constraint)
    assert reason in refused.value.message
    assert refused.value.param == "response_format"
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 800


def optional(count: int, **more) -> Constraint:
    return Constraint(
        "json", json.dumps({"properties": {f"field_{i}": more for i in range(count)}})
    )


@pytest.mark.model
@pytest.mark.parametrize(
    "constraint",
    [
        JSON,
        Constraint("json", "{}"),
        Constraint("json", "{}", behind="</think>", opener="<think>"),
        pytest.param(optional(100, type="string"), id="100 properties"),
        pytest.param(optional(1000, type="string"), id="1000 properties"),
        pytest.param(
            Constraint("json", json.dumps({"enum": [f"value {i}" for i in range(3000)]})), id="enum"
        ),
        pytest.param(
            Constraint("choice", json.dumps([f"choice {i}" for i in range(3000)])), id="choices"
        ),
        pytest.param(
            Constraint("grammar", "start: (" + " | ".join(f'"key{i}"' for i in range(300)) + ")+"),
            id="keywords",
        ),
        Constraint("grammar", 'root ::= sum\nsum ::= sum "+" sum | "(" sum ")" | [0-9]+\n'),
        Constraint("grammar", 'root ::= word (" " word)*\nword ::= [a-zA-Z] [a-z]*\n'),
        regex(r"[a-z0-9._%+-]{1,64}@[a-z0-9.-]+\.[a-z]{2,}"),
    ],
)
def test_what_people_ask_for_is_quick_enough(vocabulary, constraint):
    vocabulary.try_out(constraint.check())


def left_recursive(rules: int, first: str = "s") -> Constraint:
    """Each rule may begin with each other one, and ends at every letter."""
    names = [f"r{i}" for i in range(rules)]
    lines = [f"{name}: s X | {names[i - 1]} X" for i, name in enumerate(names)]
    return Constraint(
        "grammar",
        "\n".join([f"start: {first}", f"s: X | {' | '.join(names)}", *lines, "X: /[ab]/"]),
    )


@pytest.mark.model
@pytest.mark.parametrize(
    "constraint",
    [
        left_recursive(390),
        left_recursive(200),
        left_recursive(390, first='"aaaa" s'),
        Constraint("json", "{}", behind="a"),
    ],
    ids=["390 rules", "200 rules", "behind a text", "ours"],
)
def test_a_grammar_whose_tokens_take_too_long_is_refused(vocabulary, constraint, monkeypatch):
    if constraint.kind == "json":
        monkeypatch.setattr(grammar, "TOKEN_LIMIT_S", 1e-6)
    with pytest.raises(RequestError, match=r"limit|max") as refused:
        vocabulary.try_out(constraint.check())
    assert refused.value.code == "invalid_grammar"
    assert refused.value.message.endswith("make it simpler")
    assert "\n" not in refused.value.message


def test_a_clients_rules_have_smaller_limits_also_behind_a_text(grammars):
    for behind in ("", "</think>"):
        refused = Constraint("grammar", left_recursive(200).text, behind=behind)
        with pytest.raises(RequestError, match=r"max is 500|the limit is"):
            grammars.try_out(refused)
        matcher = grammars.matcher(grammars.as_lark(refused))  # as the engine compiles it
        assert not matcher.consume_tokens(list(f"{behind}abab".encode()))
        assert "max is 500" in matcher.get_error()


@pytest.mark.parametrize(
    "constraint",
    [
        JSON,
        regex("[ab]+"),
        Constraint("choice", '["one", "two"]'),
        Constraint("grammar", 'root ::= "a" root | "b"'),
        Constraint("json", '{"type": "integer"}', behind="</think>", opener="<think>"),
    ],
)
def test_the_same_constraint_as_lark_allows_the_same_tokens(grammars, constraint):
    matcher, lark = grammars.matcher(constraint), grammars.matcher(grammars.as_lark(constraint))
    for _ in range(8):
        allowed = matcher.compute_bitmask()
        assert lark.compute_bitmask() == allowed
        token = next(
            (i for i in range(len(TOKENS)) if i != EOS and allowed[i // 8] >> (i % 8) & 1), None
        )
        if token is None:
            break
        assert matcher.consume_token(token)
        assert lark.consume_token(token)


@pytest.mark.parametrize(
    "line", ["\n" * 32_000, " " * 32_000, "a" * 32_000, "\n \t" * 10_000, "%" * 32_000]
)
def test_a_users_grammar_is_read_in_linear_time(grammars, line):
    began = time.process_time()
    with contextlib.suppress(RequestError):
        grammars.matcher(Constraint("grammar", f'start: "a"\n{line}'))
    assert time.process_time() - began < 2


NAME = {"properties": {"name": {"type": "string"}}}
SHUT = NAME | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (NAME, SHUT),
        (NAME | {"additionalProperties": NAME}, NAME | {"additionalProperties": SHUT}),
        (NAME | {"patternProperties": {"^x": {}}}, NAME | {"patternProperties": {"^x": {}}}),
        ({"properties": {"a": NAME}}, {"properties": {"a": SHUT}, "additionalProperties": False}),
        ({"$defs": {"N": NAME}, "$ref": "#/$defs/N"}, {"$defs": {"N": SHUT}, "$ref": "#/$defs/N"}),
        ({"allOf": [NAME, {"required": ["b"]}]}, {"allOf": [NAME, {"required": ["b"]}]}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
        (
            {"properties": {"items": {"type": "string"}}},
            SHUT | {"properties": {"items": {"type": "string"}}},
        ),
    ],
)
def test_objects_that_list_their_properties_have_no_others(schema: Any, wanted: Any) -> None:
    before = repr(schema)
    assert closed(schema) == wanted
    assert repr(schema) == before
