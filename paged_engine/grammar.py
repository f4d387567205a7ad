"""Constraints on an answer's text as token masks, by llguidance: compiles, caches, and fills the masks of many rows.

A matcher never forces tokens: it allows every token that can go on, also ways to write a text that the tokenizer would
not choose. So masks need no tokenizer, and no call back into Python.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from paged_engine.closed_schema import closed
from paged_engine.guide import Guide, RowMasks, Words, words_for
from paged_engine.request import Request
from wire.errors import RequestError
from wire.sampling import GBNF_RULE, Constraint

__all__ = ["Grammars", "masks_of"]

# Of compiled grammars. Most are some 10 KB, and none is above 32 MiB (node/sandbox_process.py).
_KEPT = 32
# An automaton grows with the answers that it has seen, by 1 to 2 KB a state.
_LIMITS = LLParserLimits(max_lexer_states=50_000)
# Between JSON's tokens, unless a request says otherwise: a model that may write white space for ever does.
_WHITESPACE = "[ ]?"
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Texts are people's: no pattern here looks at a character twice.
_OPTION_LINE = re.compile(r"^[^\S\n]*+%llguidance.*+$", re.MULTILINE)
_EXCERPT = re.compile(r"\n *+\d++ \| .*+", re.DOTALL)
_LIMITS_HINT = re.compile(r"; either increase limits\..*+", re.DOTALL)
_PLACE = re.compile(r"^(at )?\d++\(\d++\): ")


class Grammars:
    """The grammars of one vocabulary. For any number of threads; compiling does not hold the GIL."""

    def __init__(
        self, tokens: Sequence[bytes], *, special_ids: Collection[int], eos_token_ids: Collection[int]
    ) -> None:
        """`tokens`: the bytes of each id of the model's vocabulary, empty for ids that mean nothing.

        Takes about 2 us per token."""
        eos = [token for token in eos_token_ids if token < len(tokens)]
        self._specials = frozenset(
            tokens[token].decode(errors="replace") for token in special_ids if token < len(tokens)
        )
        # A grammar ends with a token: a model without one gets an id that means nothing to it, or else its last.
        empty = next((token for token in reversed(range(len(tokens))) if not tokens[token]), len(tokens) - 1)
        vocabulary = _Vocabulary(tokens, special_ids, eos[0] if eos else empty)
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=eos or empty)  # type: ignore[arg-type]
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A matcher of its own for one answer. Raises RequestError with the reason, a sentence of the library's.

        Compiling takes some milliseconds, for a schema at the limit of its size a quarter of a second.
        """
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
        if found is None:
            found = self._compile(constraint)
            with self._lock:
                self._compiled[constraint] = found
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        copy: LLMatcher = found.deep_copy()
        return copy

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if constraint.behind:
            # First alone, so that errors name the client's lines.
            self._compile(msgspec.structs.replace(constraint, behind="", opener=""))
        try:
            lark = self._lark(constraint)
            matcher = LLMatcher(self._tokenizer, lark, log_level=0, limits=_LIMITS)
        except (ValueError, TypeError, KeyError, RecursionError) as why:
            raise _refused(constraint, f"{why}") from why
        if matcher.is_error():
            raise _refused(constraint, matcher.get_error())
        return matcher

    def as_lark(self, constraint: Constraint) -> Constraint:
        """The same constraint as one Lark grammar, which is compiled without Python. `matcher` must have taken it."""
        return Constraint("lark", self._lark(constraint), field=constraint.field)

    def _lark(self, constraint: Constraint) -> str:
        lark = self._body(constraint)
        return self._behind(lark, constraint.behind, constraint.opener) if constraint.behind else lark

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
                return f"{_OPTIONS}start: {' | '.join(_literal(choice) for choice in json.loads(text))}\n"
            case "grammar":
                return _user_grammar(text)
            case "tags":
                return self._tags(json.loads(text))

    def _behind(self, lark: str, text: str, opener: str) -> str:
        """The same behind free text that ends with `text`, and that need not be there if there is an opener."""
        end = self._terms(text)
        head = f"head[lazy]: TEXT {end[0]}" if end == [_literal(text)] else f"head: TEXT {' '.join(end)}"
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
        """Special tokens by name, and what stands between them as literals."""
        specials = [special for special in self._specials if special and special in text]
        pieces = re.split(f"({'|'.join(map(re.escape, specials))})", text) if specials else [text]
        return [piece if piece in self._specials else _literal(piece) for piece in pieces if piece]

    def _tags(self, tags: dict[str, Any]) -> str:
        """Free text in which each trigger begins one of the structures that begin with it."""
        rules, names = [], []
        for number, trigger in enumerate(tags["triggers"]):
            bodies = [
                f"{_literal(tag['begin'][len(trigger) :])} {_json_rule(tag['schema'], None)} {_literal(tag['end'])}"
                for tag in tags["structures"]
                if tag["begin"].startswith(trigger)
            ]
            if trigger in self._specials:
                head = f"head_{number}: TEXT {trigger}"
            else:
                head = f"head_{number}[lazy]: TEXT {_literal(trigger)}"
            rules += [head, f"tag_{number}: head_{number} ({' | '.join(bodies)})"]
            names.append(f"tag_{number}")
        return "\n".join(
            [f"{_OPTIONS}start: ({' | '.join(names)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules, ""]
        )


def masks_of(requests: Sequence[Request], vocab_size: int) -> RowMasks | None:
    """The masks of a step's rows, whose tokens are all known; row i is requests[i]. None if no row needs one.

    A row that no token can follow has no mask: its request ends, whatever is drawn.
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
    """What the matchers allow; the GIL is not held."""
    matchers: list[tuple[Any, int]] = [(g.matcher, i) for i, g in enumerate(guides) if g.matcher is not None]
    bytes_each = words.shape[1] * words.itemsize
    if len(matchers) == 1:
        matcher, place = matchers[0]
        matcher.unsafe_compute_mask_ptr(words.ctypes.data + place * bytes_each, bytes_each)
    elif matchers:
        _executor().unsafe_compute_mask_ptr(matchers, words.ctypes.data, bytes_each, len(words))


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()


class _Vocabulary:
    """As LLTokenizer reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int], eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = list(tokens), eos_token_id
        self.special_token_ids = sorted({eos_token_id, *(token for token in special_ids if token < len(tokens))})

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
    r"""`\d`, `\w` and `\s` mean ASCII: what they are beyond that differs between libraries."""
    if "\n" in regex or "\r" in regex:  # would end the rule; what they stand for is the same
        regex = regex.replace("\r", "\\r").replace("\n", "\\n")
    return f"/{regex_to_lark(regex, use_ascii='dws')}/" if regex else '""'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else '""'


def _user_grammar(text: str) -> str:
    """Lark as it is; GBNF, which begins its rules with `name ::=`, is rewritten."""
    if _OPTION_LINE.search(text):
        raise ValueError("its options are the server's; leave out the line %llguidance")
    if GBNF_RULE.search(text):
        try:
            text = _OPTION_LINE.sub("", gbnf_to_lark(text))
        except Exception as why:
            raise ValueError(f"read as GBNF (its rules are written with ::=): {why}") from why
    return f"{text}\n{_OPTIONS}"  # behind it, so that errors name the client's lines


def _refused(constraint: Constraint, why: str) -> RequestError:
    reason = _LIMITS_HINT.sub("; make it simpler", _EXCERPT.sub("", why.strip()))
    if constraint.kind != "grammar":  # whose lines are the client's own
        reason = _PLACE.sub("", reason)
    reason = " ".join(line.strip() for line in reason.splitlines() if line.strip(" ^"))
    name = {
        "lark": "grammar",
        "json": "JSON schema",
        "regex": "regular expression",
        "choice": "choice",
        "grammar": "grammar (Lark, or GBNF)",
        "tags": "structural tag",
    }[constraint.kind]
    return RequestError(
        f"{constraint.field}: this {name} cannot be followed: {reason[:600]}",
        param=constraint.field,
        code="invalid_grammar",
    )
