"""Sampling parameters, and what a model's generation config says of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvrelay.wire.config_checks import Count, Share, SomeShare
from kvrelay.wire.errors import ConfigError, RequestError, limit_of
from kvrelay.wire.json_object import JsonObject

__all__ = [
    "GBNF_RULE",
    "GENERATION_FIELDS",
    "MAX_LISTED_TOKENS",
    "MAX_LOGPROBS",
    "PLAIN_SAMPLING",
    "Bias",
    "Constraint",
    "ConstraintKind",
    "LogprobCount",
    "MinP",
    "Penalty",
    "Positive",
    "RepetitionPenalty",
    "SamplingDefaults",
    "SamplingParams",
    "Seed",
    "Temperature",
    "TopK",
    "TopP",
    "generation_values",
]

MAX_LOGPROBS = 20
MAX_LISTED_TOKENS = 1024
"""Listed tokens are applied one by one in every step."""
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = SomeShare
TopK = Annotated[int, Meta(ge=-1)]
"""0 and -1 consider all tokens."""
MinP = Share
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Outside of this, logits divided or multiplied by it leave fp32.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

ConstraintKind = Literal["json", "regex", "choice", "grammar", "lark"]

# Compile time grows with these; 64 KiB hold 1,000 properties.
_MAX_CONSTRAINT_CHARS: dict[ConstraintKind, int] = {
    "json": 64 << 10,
    "choice": 64 << 10,
    "grammar": 32 << 10,
    "regex": 4 << 10,
}
_MAX_WHITESPACE_CHARS = 128
# Parsers recurse into brackets, rules and references.
_MAX_BRACKETS_DEEP = 64
_MAX_RULES = 400
_RULE = {
    "json": re.compile('"\\$ref"'),
    "grammar": re.compile("^[^\n:]*+:", re.MULTILINE),
}
GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++[^\S\n]*+::=", re.MULTILINE)
"""Found in GBNF grammars; others are Lark."""
# What has no depth: texts, comments, special tokens, GBNF's classes. Lark's regular expressions
# have their own.
_TEXT = r'"(?:[^"\\]++|\\.)*+"?'
_FLAT = {
    "json": re.compile(_TEXT, re.DOTALL),
    "lark": re.compile(
        _TEXT + r"|(?:#|//)[^\n]*+|<[^<>\s]*+>?|(/(?:[^/\\]++|\\.)*+/?[a-z]*+)", re.DOTALL
    ),
    "gbnf": re.compile(_TEXT + r"|#[^\n\r]*+|\[(?:[^\]\\]++|\\.)*+\]?", re.DOTALL),
}
_BRACKET = re.compile(r"[()\[\]{}]")
# A class's first character may be a bracket, too.
_REGEX_BRACKET = re.compile(r"\\.|\[\^?\]?|[()\]]", re.DOTALL)
# It may have comments, which hide brackets: each that opens counts.
_VERBOSE = re.compile(r"\(\?[a-wyzA-Z-]*x|/[a-wyz]*x[a-z]*$")


class Constraint(Struct, frozen=True, array_like=True):
    """A constraint on the text of an answer, followed by masking tokens (paged_engine/grammar.py).

    `text` by kind: json: a schema; regex: for the whole answer; choice: a JSON list of answers;
    grammar: Lark or GBNF; lark: any of these, compiled. `whitespace` is a regular expression
    between JSON tokens; None: at most one space. `field` is the request's field, for
    errors. Text up to `behind` is free; with an `opener` only where the text begins with it.
    """

    kind: ConstraintKind
    text: str
    whitespace: str | None = None
    field: str = "response_format"
    behind: str = ""
    opener: str = ""

    def check(self) -> Constraint:
        """Return self, or raise RequestError if it is too large."""
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


class SamplingParams(Struct, frozen=True, array_like=True):
    """A choice's sampling parameters. Token i is a function of (logits, these values, i):
    kernels/sampling.py.

    `top_k` 0, `top_p` 1 and `logprobs` None are off; `temperature` 0 is greedy; `logprobs` k means
    the chosen token and the k likeliest, `prompt_logprobs` the same of the prompt from its second
    token on. The last token of each of `bad_words` never follows the others.
    """

    max_tokens: Positive
    seed: Seed
    choice: int = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Count = 0
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, Bias], ...] = ()
    logprobs: LogprobCount | None = None
    constraint: Constraint | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: LogprobCount | None = None

    @property
    def guided(self) -> bool:
        """Return whether a constraint, allowed tokens or bad words rule tokens out."""
        return (
            self.constraint is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
        )

    def check(self, vocab_size: int) -> SamplingParams:
        """Return self. Raises RequestError for what the types cannot say."""
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most {self.max_tokens} (max_tokens), got {self.min_tokens}",
                param="min_tokens",
            )
        if self.min_tokens and len(set(self.stop_token_ids)) >= vocab_size:
            raise RequestError(
                f"stop_token_ids lists all {vocab_size} tokens and min_tokens forbids them; list "
                f"fewer",
                param="stop_token_ids",
            )
        if (count := sum(map(len, self.bad_words))) > MAX_LISTED_TOKENS:
            raise RequestError(
                f"bad_words lists {count} tokens; the limit is {MAX_LISTED_TOKENS}",
                param="bad_words",
            )
        for name, tokens in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", itertools.chain(*self.bad_words)),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} must be between 0 and {vocab_size - 1}, got {token}", param=name
                    )
        return self


class SamplingDefaults(Struct, frozen=True, omit_defaults=True):
    """A model's own sampling, for fields that a request leaves out."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Count = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_tokens: Positive | None = None
    """Tokens of a chat's answer; None: as many as fit."""
    limit: Positive | None = None
    """Most tokens of any answer."""


PLAIN_SAMPLING = SamplingDefaults()
"""The API's own defaults."""
GENERATION_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


def generation_values(
    values: Mapping[str, Any], where: str = "override_generation_config", remedy: str = "mend it"
) -> JsonObject:
    """Return a generation config's sampling. Raises ConfigError for a wrong value."""
    found = {field: values[field] for field in GENERATION_FIELDS if values.get(field) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    own = dict(found)
    try:
        msgspec.convert(own | {"max_tokens": own.pop("max_new_tokens", None)}, SamplingDefaults)
    except msgspec.ValidationError as why:
        said, _, where_ = str(why).partition(" - at `$.")
        name = where_.strip("`").replace("max_tokens", "max_new_tokens")
        limit = limit_of(said)
        wrong = f"is of a wrong type: {said}" if limit is None else f"must {limit}"
        raise ConfigError(f"{where}: {name} {wrong}, got {found[name]!r}; {remedy}") from why
    return found
