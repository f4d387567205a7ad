"""Constraints on an answer's text as token masks, by llguidance.

The step loop waits for masks, so a token's time is limited: by the library, which counts; by
`try_out`; and by TimedMatcher, in the loop.
"""

from __future__ import annotations

import functools
import json
import random
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvrelay.paged_engine.guide import Guide, RowMasks, Words, first_line, words_for
from kvrelay.paged_engine.request import Request
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import GBNF_RULE, Constraint

__all__ = ["Grammars", "TOKEN_LIMIT_S", "TimedMatcher", "closed", "row_masks"]

_ONE_SCHEMA = (
    "items",
    "additionalItems",
    "contains",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
)
_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords that may name further properties.
_OPEN = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "$ref",
    "anyOf",
    "oneOf",
)


def closed(schema: Any) -> Any:
    """Return a schema in which objects that list properties have no others.

    A small model invents properties until its limit. Schemas that say what else may be there, and
    parts of an `allOf`, stay open.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _ONE_SCHEMA:
            found[name] = closed(value)
        elif name in _SCHEMAS and isinstance(value, list):
            found[name] = [closed(each) for each in value]
        elif name in _NAMED_SCHEMAS and isinstance(value, dict):
            found[name] = {key: closed(each) for key, each in value.items()}
    if "properties" in schema and not any(name in schema for name in _OPEN):
        found["additionalProperties"] = False
    return found


# Most are some 10 KB, none is above 32 MiB (node/sandbox_process.py).
_KEPT = 32
TOKEN_LIMIT_S = 0.03
"""CPU time for a token's mask and step; common grammars take 3 ms."""
_TRIED_PATHS, _TRIED_TOKENS = 3, 16
_STALL_S = 0.1
_STALLS = 3
_WATCHED_STEPS = 64
# An automaton grows by 1 to 2 KB a state. 1,000 optional properties are 4,110 items in a row and
# more than 50,000 in a step, which take 16 ms.
_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=5000, step_max_items=100_000)
# Of rules that begin with each other 1,561 items in a row take 40 ms; 300 keywords have 304 in a
# row, C's expressions 4,100 in a step.
_CLIENTS_LIMITS = LLParserLimits(
    max_lexer_states=50_000, max_items_in_row=500, step_max_items=10_000
)
_CLIENTS = "\n// rules of a client\n"
# A model that may write white space forever does.
_WHITESPACE = "[ ]?"
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# No pattern here may backtrack: texts come from clients.
_OPTION_LINE = re.compile(r"^[^\S\n]*+%llguidance.*+$", re.MULTILINE)
_EXCERPT = re.compile(r"\n *+\d++ \| .*+", re.DOTALL)
_LIMITS_HINT = re.compile(
    r"; (?:either increase limits\.|consider making|try avoiding).*+", re.DOTALL
)
_PLACE = re.compile(r"^(at )?\d++\(\d++\): ")


class Grammars:
    """A cache of compiled grammars of one vocabulary, for any thread."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special_ids: Collection[int],
        eos_token_ids: Collection[int],
    ) -> None:
        """Take the bytes of each token id, empty for unused ids; 2 us per token."""
        eos = [token for token in eos_token_ids if token < len(tokens)]
        self._specials = frozenset(
            tokens[token].decode(errors="replace") for token in special_ids if token < len(tokens)
        )
        self._ends = eos
        # Without an end token a grammar gets an unused id, or else the last.
        empty = next(
            (token for token in reversed(range(len(tokens))) if not tokens[token]), len(tokens) - 1
        )
        vocabulary = _Vocabulary(tokens, special_ids, eos[0] if eos else empty)
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=eos or empty)  # type: ignore[arg-type]
        self._compiled = functools.lru_cache(_KEPT)(self._compile)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Return a new matcher for one answer. Raises RequestError with the library's reason.

        Compiling takes milliseconds, for the largest schemas 250.
        """
        copy: LLMatcher = self._compiled(constraint).deep_copy()
        return copy

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if constraint.behind:
            # So that errors name the client's lines.
            self._compile(msgspec.structs.replace(constraint, behind="", opener=""))
        try:
            lark = self._lark(constraint)
            limits = _CLIENTS_LIMITS if _CLIENTS in lark else _LIMITS
            matcher = LLMatcher(self._tokenizer, lark, log_level=0, limits=limits)
        except (ValueError, TypeError, KeyError, RecursionError) as why:
            raise _refused(constraint, f"{why}") from why
        if matcher.is_error():
            raise _refused(constraint, matcher.get_error())
        return matcher

    def try_out(self, constraint: Constraint) -> None:
        """Follow a few answers; raise RequestError if a token takes too long."""
        if constraint.behind:
            self.try_out(msgspec.structs.replace(constraint, behind="", opener=""))
        for path in range(_TRIED_PATHS):
            pick, matcher, tokens = random.Random(path), self.matcher(constraint), list[int]()
            while len(tokens) < _TRIED_TOKENS and not matcher.is_stopped():
                took, mask = _timed_step(matcher, tokens[-1:])
                # The first time the automaton is built, and the machine may be busy.
                if took > TOKEN_LIMIT_S:
                    again = self.matcher(constraint)
                    again.consume_tokens(tokens[:-1])
                    took = min(took, _timed_step(again, tokens[-1:])[0])
                if matcher.is_error():
                    raise _refused(constraint, first_line(matcher.get_error()))
                if took > TOKEN_LIMIT_S:
                    raise _refused(
                        constraint,
                        f"a token takes {took * 1000:.0f} ms of CPU time; the limit is "
                        f"{TOKEN_LIMIT_S * 1000:.0f} ms: make it simpler",
                    )
                allowed = np.flatnonzero(
                    np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
                )
                allowed = allowed[~np.isin(allowed, self._ends)]
                if not len(allowed):
                    break
                tokens.append(int(allowed[pick.randrange(len(allowed))]))

    def as_lark(self, constraint: Constraint) -> Constraint:
        return Constraint("lark", self._lark(constraint), field=constraint.field)

    def _lark(self, constraint: Constraint) -> str:
        lark = self._body(constraint)
        return (
            self._behind(lark, constraint.behind, constraint.opener) if constraint.behind else lark
        )

    def _body(self, constraint: Constraint) -> str:
        text = constraint.text
        match constraint.kind:
            case "lark":
                return text
            case "json":
                return f"{_OPTIONS}start: {_json_rule(json.loads(text), constraint.whitespace)}\n"
            case "regex":
                return f"{_OPTIONS}start: {_regex_rule(text)}\n"
            case "choice":
                return (
                    f"{_OPTIONS}start: "
                    f"{' | '.join(_literal(choice) for choice in json.loads(text))}\n"
                )
            case "grammar":
                return _user_grammar(text)

    def _behind(self, lark: str, text: str, opener: str) -> str:
        end = self._terms(text)
        head = (
            f"head[lazy]: TEXT {end[0]}"
            if end == [_literal(text)]
            else f"head: TEXT {' '.join(end)}"
        )
        begin = f"BLANKS {' '.join(self._terms(opener))} " if opener else ""
        rules = [
            f"{_OPTIONS}start: {'free?' if opener else 'free'} body",
            f"free: {begin}head BLANKS",
            head,
            r"TEXT: /(.|\n)*/",
            r"BLANKS: /[ \t\r\n]{0,8}/",
            f"body: %lark {{\n{lark}\n}}\n",
        ]
        return "\n".join(rules)

    def _terms(self, text: str) -> list[str]:
        specials = [special for special in self._specials if special and special in text]
        pieces = re.split(f"({'|'.join(map(re.escape, specials))})", text) if specials else [text]
        return [piece if piece in self._specials else _literal(piece) for piece in pieces if piece]


class TimedMatcher:
    """A matcher that fails once it has held up the step loop too often."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        self.watched = 0
        """Next masks to compute alone."""
        self._stalls = 0
        self._error = ""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        began = time.thread_time()
        matches: bool = self.inner.consume_tokens(sampled_tokens)
        self._took((time.thread_time() - began) / max(1, len(sampled_tokens)))
        return matches

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        began = time.thread_time()
        self.inner.unsafe_compute_mask_ptr(pointer, size)
        self._took(time.thread_time() - began)
        self.watched = max(0, self.watched - 1)

    def is_stopped(self) -> bool:
        return self.is_error() or self.inner.is_stopped()

    def is_error(self) -> bool:
        return bool(self._error) or self.inner.is_error()

    def get_error(self) -> str:
        return self._error or self.inner.get_error()

    def _took(self, seconds: float) -> None:
        self._stalls += seconds > _STALL_S
        if self._stalls >= _STALLS and not self._error:
            self._error = (
                f"{self._stalls} of its tokens took more than {_STALL_S * 1000:.0f} ms of CPU "
                f"time, the last one {seconds * 1000:.0f} ms; the limit is {_STALLS - 1} of an "
                "answer: make the grammar simpler"
            )


def row_masks(requests: Sequence[Request], vocab_size: int) -> RowMasks | None:
    """Return the masks of a step's rows; row i is requests[i]. None if no row needs one.

    A row that no token can follow has no mask.
    """
    guided = [
        (row, request, request.guide)
        for row, request in enumerate(requests)
        if request.guide is not None and request.finish is None
    ]
    if not guided:
        return None
    words = np.full((len(guided), words_for(vocab_size)), 0xFFFFFFFF, np.uint32)
    for _, request, guide in guided:
        guide.follow(request.token_ids, request.prompt_tokens)
    _fill([guide for _, _, guide in guided], words)
    kept = []
    for place, (_, request, guide) in enumerate(guided):
        guide.check()
        guide.narrow(words[place], request.token_ids, request.prompt_tokens)
        if not guide.spent:
            kept.append(place)
    return RowMasks([guided[place][0] for place in kept], words[kept]) if kept else None


def _fill(guides: Sequence[Guide], words: Words) -> None:
    bytes_each = words.shape[1] * words.itemsize
    matchers = [(guide.matcher, at) for at, guide in enumerate(guides) if guide.matcher is not None]
    alone = [(matcher, at) for matcher, at in matchers if matcher.watched]
    together = [(matcher, at) for matcher, at in matchers if not matcher.watched]
    if len(together) == 1:
        alone, together = matchers, []
    for matcher, place in alone:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data + place * bytes_each, bytes_each)
    if together:
        began = time.perf_counter()
        inner = [(matcher.inner, place) for matcher, place in together]
        _executor().unsafe_compute_mask_ptr(inner, words.ctypes.data, bytes_each, len(words))
        if time.perf_counter() - began > _STALL_S:
            for matcher, _ in together:
                matcher.watched = _WATCHED_STEPS


def _timed_step(matcher: LLMatcher, tokens: list[int]) -> tuple[float, bytes]:
    began = time.thread_time()
    matcher.consume_tokens(tokens)
    mask: bytes = matcher.compute_bitmask()
    return time.thread_time() - began, mask


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()


class _Vocabulary:
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Collection[int], eos_token_id: int
    ) -> None:
        self.tokens, self.eos_token_id = list(tokens), eos_token_id
        self.special_token_ids = sorted(
            {eos_token_id, *(token for token in special_ids if token < len(tokens))}
        )

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("a matcher that forces nothing tokenizes nothing")


def _json_rule(schema: Any, whitespace: str | None) -> str:
    if isinstance(schema, dict):
        guidance = {"whitespace_pattern": _WHITESPACE if whitespace is None else whitespace}
        schema = {"x-guidance": guidance} | closed(schema)
    elif schema is True:
        return _json_rule({}, whitespace)
    return f"%json {json.dumps(schema)}"


def _regex_rule(regex: str) -> str:
    if "\n" in regex or "\r" in regex:
        regex = regex.replace("\r", "\\r").replace("\n", "\\n")
    return f"/{regex_to_lark(regex, use_ascii='dws')}/" if regex else '""'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else '""'


def _user_grammar(text: str) -> str:
    if _OPTION_LINE.search(text):
        raise ValueError("its options are the server's; leave out the line %llguidance")
    if GBNF_RULE.search(text):
        try:
            text = _OPTION_LINE.sub("", gbnf_to_lark(text))
        except Exception as why:
            raise ValueError(f"read as GBNF (its rules are written with ::=): {why}") from why
    return f"{text}\n{_OPTIONS}{_CLIENTS}"


def _refused(constraint: Constraint, why: str) -> RequestError:
    reason = _LIMITS_HINT.sub("; make it simpler", _EXCERPT.sub("", why.strip()))
    if constraint.kind != "grammar":
        reason = _PLACE.sub("", reason)
    reason = " ".join(line.strip() for line in reason.splitlines() if line.strip(" ^"))
    name = {
        "lark": "grammar",
        "json": "JSON schema",
        "regex": "regular expression",
        "choice": "choice",
        "grammar": "grammar (Lark, or GBNF)",
    }[constraint.kind]
    return RequestError(
        f"{constraint.field}: this {name} cannot be followed: {reason[:600]}",
        param=constraint.field,
        code="invalid_grammar",
    )
