"""Sampling parameters, and what a model's generation config says of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvrelay.wire.errors import ConfigError, RequestError

__all__ = [
    "GBNF_RULE",
    "GENERATION_FIELDS",
    "MAX_LOGPROBS",
    "PLAIN_SAMPLING",
    "Constraint",
    "ConstraintKind",
    "SamplingDefaults",
    "SamplingParams",
    "check_count",
    "generation_values",
]

MAX_LOGPROBS = 20
_MAX_SEED = 2**63 - 1
# Outside of this, logits divided or multiplied by it leave fp32.
_REPETITION_PENALTY = (0.01, 100)
# These are applied one by one, in every step and for everybody in the batch.
_MAX_LISTED_TOKENS = 1024

ConstraintKind = Literal["json", "regex", "choice", "grammar", "tags", "lark"]

# Compile time grows with these. 64 KiB are a schema of 1,000 properties, or of 100 tools.
_MAX_CONSTRAINT_CHARS: dict[ConstraintKind, int] = {
    "json": 64 << 10,
    "tags": 64 << 10,
    "choice": 64 << 10,
    "grammar": 32 << 10,
    "regex": 4 << 10,
}
_MAX_WHITESPACE_CHARS = 128
# Parsers recurse into brackets, and into rules and references that stand for each other.
_MAX_BRACKETS_DEEP = 64
_MAX_RULES = 400
_RULE = {
    "json": re.compile('"\\$ref"'),
    "tags": re.compile('"\\$ref"'),
    "grammar": re.compile("^[^\n:]*+:", re.MULTILINE),
}
GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++[^\S\n]*+::=", re.MULTILINE)
"""A grammar that has one is read as GBNF, any other as Lark."""
# What has no depth: texts, comments, names of special tokens, classes of GBNF. They begin and end
# where the grammar library says, or it refuses the grammar. Lark's regular expressions have a depth
# of their own.
_TEXT = r'"(?:[^"\\]++|\\.)*+"?'
_FLAT = {
    "json": re.compile(_TEXT, re.DOTALL),
    "lark": re.compile(
        _TEXT + r"|(?:#|//)[^\n]*+|<[^<>\s]*+>?|(/(?:[^/\\]++|\\.)*+/?[a-z]*+)", re.DOTALL
    ),
    "gbnf": re.compile(_TEXT + r"|#[^\n\r]*+|\[(?:[^\]\\]++|\\.)*+\]?", re.DOTALL),
}
_BRACKET = re.compile(r"[()\[\]{}]")
# Of a regular expression: a bracket that begins a class or another class in it may be its first
# character, too.
_REGEX_BRACKET = re.compile(r"\\.|\[\^?\]?|[()\]]", re.DOTALL)
# It may have comments, which hide brackets: each that opens counts.
_VERBOSE = re.compile(r"\(\?[a-wyzA-Z-]*x|/[a-wyz]*x[a-z]*$")


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """A constraint that the text of an answer must match. Tokens are masked so that it does:
    paged_engine/grammar.py.

    `text` by kind: json: a JSON schema. regex: a regular expression for the whole answer. choice: a
    JSON list of strings, of which the answer is one. grammar: a Lark grammar, or GBNF. tags: free
    text with constrained parts, a JSON object {"structures": [{"begin", "schema", "end"}],
    "triggers": [...]}. lark: any of these as the Lark grammar that the engine compiles; no request
    has it. `whitespace`: json: what may stand between tokens, as a regular expression; None is at
    most one space. `field`: the request's field that asked for it, which an error names. `behind`:
    the text is free up to this one, and the constraint is about what follows; empty: it is about
    all. If there is an `opener`, so only where the text begins with that; else the constraint is
    about all.
    """

    kind: ConstraintKind
    text: str
    whitespace: str | None = None
    field: str = "response_format"
    behind: str = ""
    opener: str = ""

    def check(self) -> Constraint:
        """Return self, or raise RequestError if it is too large. Whether it compiles, a grammar
        library says.
        """
        self._at_most("characters", len(self.text), _MAX_CONSTRAINT_CHARS[self.kind])
        self._at_most(
            "characters in its whitespace pattern",
            len(self.whitespace or ""),
            _MAX_WHITESPACE_CHARS,
        )
        if self.kind in _RULE:
            self._at_most(
                "rules or references", len(_RULE[self.kind].findall(self.text)), _MAX_RULES
            )
        if self.kind != "choice":
            self._at_most(
                "levels of brackets", _brackets_deep(self.kind, self.text), _MAX_BRACKETS_DEEP
            )
        return self

    def _at_most(self, what: str, count: int, limit: int) -> None:
        if count > limit:
            raise RequestError(
                f"{self.field} has {count} {what}; the limit is {limit}", param=self.field
            )


def _brackets_deep(kind: ConstraintKind, text: str) -> int:
    if kind == "regex":
        return _regex_deep(text)
    language = "json" if kind != "grammar" else "gbnf" if GBNF_RULE.search(text) else "lark"
    deep = deepest = 0
    for bracket in _BRACKET.findall(_FLAT[language].sub("", text)):
        deep = deep + 1 if bracket in "([{" else max(0, deep - 1)
        deepest = max(deepest, deep)
    regexes = (
        [found[1] for found in _FLAT["lark"].finditer(text) if found[1]]
        if language == "lark"
        else []
    )
    return max([deepest, *map(_regex_deep, regexes)])


def _regex_deep(text: str) -> int:
    if _VERBOSE.search(text):
        return text.count("(") + text.count("[")
    groups = classes = deepest = 0
    for piece in _REGEX_BRACKET.findall(text):
        if piece[0] == "[":
            classes += 1
        elif piece == "]":
            classes = max(0, classes - 1)
        elif piece[0] != "\\" and not classes:
            groups = groups + 1 if piece == "(" else max(0, groups - 1)
        deepest = max(deepest, groups + classes)
    return deepest


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """A choice's sampling parameters. Token i is a function of (logits, these values, i): see
    kernels/sampling.py.

    `seed` is always set (a request without one is given one at the door); `top_k` 0 and `top_p` 1
    are off; `temperature` 0 is greedy; `logprobs` None is off, k means the chosen token and the k
    most likely; `prompt_logprobs` means the same of the prompt's tokens from the second one on. Of
    each of `bad_words` the last token never follows the others.
    """

    max_tokens: int
    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    constraint: Constraint | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None

    def check(self, vocab_size: int) -> SamplingParams:
        """Return self, or raise RequestError naming the field, its value and its limits."""
        _within("max_tokens", self.max_tokens, 1, None)
        _within("seed", self.seed, -_MAX_SEED - 1, _MAX_SEED)
        _within("temperature", self.temperature, 0, 2)
        if not (0 < self.top_p <= 1):
            raise RequestError(
                f"top_p must be above 0 and at most 1, got {self.top_p}", param="top_p"
            )
        _within("top_k", self.top_k, 0, None, "; 0 or -1 considers all tokens")
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _within("repetition_penalty", self.repetition_penalty, *_REPETITION_PENALTY)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens, " (max_tokens)")
        if self.min_tokens and len(set(self.stop_token_ids)) >= vocab_size:
            raise RequestError(
                f"stop_token_ids lists all {vocab_size} tokens and min_tokens forbids them; list "
                f"fewer",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _within("stop_token_ids", token, 0, vocab_size - 1)
        for token, bias in self.logit_bias:
            _within("logit_bias", token, 0, vocab_size - 1)
            _within("logit_bias", bias, -100, 100)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.constraint is not None:
            self.constraint.check()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must not be empty; leave it out", param="allowed_token_ids"
            )
        for token in self.allowed_token_ids or ():
            _within("allowed_token_ids", token, 0, vocab_size - 1)
        check_count("bad_words", sum(map(len, self.bad_words)))
        for token in itertools.chain(*self.bad_words):
            _within("bad_words", token, 0, vocab_size - 1)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        return self


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's own sampling, for the fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """Of a chat; None: as many as fit."""
    limit: int | None = None
    """No answer has more tokens, whatever is asked for."""


PLAIN_SAMPLING = SamplingDefaults()
"""What the API has for fields that are left out."""
GENERATION_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)
"""What is taken from a generation config."""


def _within(name: str, value: float, low: float, high: float | None, why: str = "") -> None:
    # Whole numbers are compared as they are: JSON allows ones that no float can hold.
    if (
        (isinstance(value, float) and not math.isfinite(value))
        or value < low
        or (high is not None and value > high)
    ):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {limit}{why}, got {value}", param=name)


def generation_values(
    values: Mapping[str, Any], where: str = "override_generation_config", remedy: str = "mend it"
) -> dict[str, Any]:
    """Return a generation config's values for sampling, by the rules for requests.

    Raises ConfigError for a wrong one."""
    found = {field: values[field] for field in GENERATION_FIELDS if values.get(field) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    own = dict(found)
    max_tokens = own.pop("max_new_tokens", 1)
    try:
        msgspec.convert({**own, "max_tokens": max_tokens}, SamplingDefaults)
        SamplingParams(max_tokens=max_tokens, seed=0, **own).check(1)
    except (msgspec.ValidationError, RequestError) as why:
        said = str(why).replace("max_tokens", "max_new_tokens")
        raise ConfigError(f"{where}: {said}; {remedy}") from why
    return found


def check_count(name: str, count: int) -> None:
    """Raise RequestError for a list of more tokens than a request may name."""
    if count > _MAX_LISTED_TOKENS:
        raise RequestError(
            f"{name} lists {count} tokens; the limit is {_MAX_LISTED_TOKENS}", param=name
        )
