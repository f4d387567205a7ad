"""Constraints of what follows free text: reasoning comes first, and only the answer is held to its
form.
"""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from kvrelay.paged_engine.grammar import Grammars
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import Constraint

EOS, OPEN, CLOSE = 2, 256, 257
BYTES = [b"<end>" if token == EOS else bytes([token]) for token in range(256)]
TOKENS = [*BYTES, b"<think>", b"</think>"]
JSON = Constraint(
    "json",
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)
KINDS = [
    (JSON, '{"a": 1}'),
    (Constraint("regex", "[ab]+"), "ab"),
    (Constraint("choice", '["yes", "no"]'), "no"),
    (Constraint("grammar", 'start: "x" y\ny: /[0-9]/'), "x5"),
    (Constraint("grammar", 'root ::= "x" [0-9]'), "x5"),
]


@pytest.fixture(scope="module", params=["special", "ordinary"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    """The markers are special tokens, or tokens like others."""
    special = [EOS, OPEN, CLOSE] if request.param == "special" else [EOS]
    return Grammars(TOKENS, special_ids=special, eos_token_ids=[EOS])


def tokens(text: str) -> list[int]:
    """A marker is one token."""
    found: list[int] = []
    while text:
        marker = next((m for m in ("<think>", "</think>") if text.startswith(m)), None)
        found += (
            list(text[0].encode()) if marker is None else [OPEN if marker == "<think>" else CLOSE]
        )
        text = text[len(marker or "x") :]
    return found


def accepted(grammars: Grammars, constraint: Constraint, text: str) -> bool:
    """Whether the whole text is one that the constraint allows."""
    matcher = grammars.matcher(constraint)
    return matcher.try_consume_tokens(ids := tokens(text)) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("constraint", "content"), KINDS)
def test_the_answer_behind_reasoning_keeps_to_it(
    grammars: Grammars, constraint: Constraint, content: str
) -> None:
    behind = msgspec.structs.replace(constraint, behind="</think>")
    for thought in ("", "hm\n", 'é {"a": 2} < no '):
        for blanks in ("", "\n\n"):
            assert accepted(grammars, behind, f"{thought}</think>{blanks}{content}")
    assert not accepted(grammars, behind, content)
    assert not accepted(grammars, behind, "hm</think>?")
    assert not accepted(grammars, behind, f"hm</think>{content}?")
    # The first end counts.
    assert not accepted(grammars, behind, f"hm</think>a</think>{content}")


@pytest.mark.parametrize(("constraint", "content"), KINDS)
def test_reasoning_that_may_come_first(
    grammars: Grammars, constraint: Constraint, content: str
) -> None:
    maybe = msgspec.structs.replace(constraint, behind="</think>", opener="<think>")
    assert accepted(grammars, maybe, content)
    assert accepted(grammars, maybe, f"<think>\nhm\n</think>\n\n{content}")
    assert accepted(grammars, maybe, f"\n<think></think>{content}")
    assert not accepted(grammars, maybe, "hm")
    assert not accepted(grammars, maybe, f"hm</think>{content}")


def test_markers_of_several_special_tokens_and_words() -> None:
    markers = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    ids = {text: 256 + at for at, text in enumerate(markers)}
    grammars = Grammars(
        [*BYTES, *(text.encode() for text in markers)],
        special_ids=[EOS, *ids.values()],
        eos_token_ids=[EOS],
    )
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    harmony = msgspec.structs.replace(JSON, behind=final, opener="<|channel|>analysis<|message|>")
    for text, fits in (
        (f'<|channel|>analysis<|message|>hm {{}}{final}{{"a": 1}}', True),
        ('{"a": 1}', True),
        (f"<|channel|>analysis<|message|>hm{final}no", False),
        ('<|channel|>analysis<|message|>hm<|end|>{"a": 1}', False),
    ):
        found = [piece for piece in re.split("(<[|][a-z]+[|]>)", text) if piece]
        tokens = [
            token
            for piece in found
            for token in ([ids[piece]] if piece in ids else list(piece.encode()))
        ]
        matcher = grammars.matcher(harmony)
        assert (
            matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        ) is fits


def test_a_bad_grammar_is_told_as_it_is_without_reasoning(grammars: Grammars) -> None:
    bad = Constraint("grammar", "start: nowhere", field="guided_grammar")
    said = []
    for constraint in (bad, msgspec.structs.replace(bad, behind="</think>", opener="<think>")):
        with pytest.raises(RequestError) as refused:
            grammars.matcher(constraint)
        said.append(refused.value.message)
    assert said[0] == said[1]
