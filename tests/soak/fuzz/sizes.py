"""How large: sizes up to every limit, and values of such a size for a field of any type.

Pure; owns no socket.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from msgspec import inspect

import kvrelay.openai_api
import kvrelay.router
from kvrelay.wire.router_config import RouterConfig
from tests.soak.chaos.asks import CONTEXT

__all__ = ["MAX_BODY", "UNITS", "Generator", "generators", "ladder", "limits", "text"]

MAX_BODY: int = RouterConfig().max_body_bytes
UNITS = (
    "a",
    "\n",
    " ",
    "a?",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "<",
    "\\",
    "7",
    '"',
    "\x00",
    "é",
    "\U0001f600",
    "\u200b",
    "e\u0301",
    "<|end|>",
    "{{",
    "</think>",
    "<tool_call>",
    "word ",
    "\r\n",
)
"""Repeated in texts: quadratic in somebody's pattern, many tokens each, or special to a parser."""
_STEPS = 10
_ITEMS = {
    "user messages": b'{"role":"user","content":"a"}',
    "assistant messages": b'{"role":"assistant","content":"a"}',
    "long assistant messages": b'{"role":"assistant","content":"%b"}' % (b"a" * 500),
    "system messages": b'{"role":"system","content":"a"}',
    "tool messages": b'{"role":"tool","tool_call_id":"a","content":"a"}',
    "functions": b'{"type":"function","name":"a","function":{"name":"a"}}',
    "function calls": b'{"type":"function_call","call_id":"a","name":"a","arguments":"{}"}',
    "function outputs": b'{"type":"function_call_output","call_id":"a","output":"a"}',
    "reasonings": b'{"type":"reasoning","summary":[]}',
    "tool uses": b'{"type":"tool_use","id":"a","name":"a","input":{}}',
    "tool results": b'{"type":"tool_result","tool_use_id":"a","content":"a"}',
}
"""In lists, by role or type: each goes another way through a translation."""
_HOME = "http://127.0.0.1:9/"


@dataclass(frozen=True)
class Generator:
    """Values of any size. `most`: where its units are no bytes, how many there may be."""

    name: str
    make: Callable[[int], bytes]
    most: int = 0

    def capped(self, most_bytes: int) -> int:
        """The largest size whose value is no longer than that, or nearly it where units differ in
        length.
        """
        if self.most:
            return min(self.most, most_bytes)
        one, more = len(self.make(1)), len(self.make(65))
        size = max(1, (most_bytes - one) * 64 // max(1, more - one) + 1)
        while size > 1 and (length := len(self.make(size))) > most_bytes:
            size = min(size - 1, size * most_bytes // length)
        return size


@cache
def limits() -> tuple[int, ...]:
    """Every limit that the code has a name for, in whatever unit: the constants MAX_ of what reads
    requests.
    """
    found = {MAX_BODY, CONTEXT}
    for package in (kvrelay.openai_api, kvrelay.router, kvrelay.wire):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if "MAX_" in name:
                    several = value.values() if isinstance(value, dict) else (value,)
                    found |= {each for each in several if type(each) is int}
    return tuple(sorted(found))


def ladder(rng: random.Random, generator: Generator, most_bytes: int = MAX_BODY) -> list[int]:
    """Sizes from 1 up: one drawn from each part of a logarithmic scale, two limits, and one beyond
    each of these.

    A limit is the largest size, or any of limits(), taken as a count and as bytes.
    """
    top = generator.capped(most_bytes)
    steps = [math.exp(rng.uniform(at, at + 1) / _STEPS * math.log(top)) for at in range(_STEPS)]
    ends = {*limits(), *(generator.capped(limit) for limit in limits() if limit <= most_bytes)}
    within = [end for end in sorted(ends) if end <= top]
    drawn = [rng.choice([*within, top]) for _ in range(2)]
    return sorted({1, *(max(1, int(step)) for step in steps), *drawn, *(end + 1 for end in drawn)})


def text(unit: str, count: int, before: str = "", behind: str = "") -> bytes:
    return b'"' + _escaped(before) + _escaped(unit) * count + _escaped(behind) + b'"'


def generators(types: Iterable[inspect.Type], *, at_home: bool = False) -> list[Generator]:
    """Find the generators for values of these types; `at_home`: texts are addresses of nobody on
    this machine.

    Raises TypeError for a type that has none.
    """
    found = [
        Generator("nested arrays", lambda n: b"[" * n + b"]" * n),
        Generator("nested objects", lambda n: b'{"a":' * n + b"1" + b"}" * n),
    ]
    for kind in types:
        found += _of(kind, _HOME if at_home else "")
    return list({generator.name: generator for generator in found}.values())


def _of(kind: inspect.Type, before: str) -> list[Generator]:
    match kind:
        case inspect.Metadata(type=inner):
            return _of(inner, before)
        case inspect.StrType() | inspect.BytesType() | inspect.LiteralType() | inspect.EnumType():
            return _texts(before)
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType():
            return _numbers()
        case inspect.ListType() | inspect.VarTupleType() | inspect.TupleType():
            return _lists()
        case inspect.StructType(array_like=True):
            return _lists()
        case inspect.DictType() | inspect.StructType():
            return _objects()
        case inspect.AnyType() | inspect.RawType():
            return [*_texts(before), *_numbers(), *_lists(), *_objects()]
    raise TypeError(f"no generator for {kind}")


def _texts(before: str) -> list[Generator]:
    def repeated(unit: str) -> Generator:
        return Generator(f"text of {unit!r}", lambda n: text(unit, n, before))

    return [repeated(unit) for unit in UNITS]


def _numbers() -> list[Generator]:
    return [
        Generator("number", lambda n: b"%d" % n, 2**70),
        Generator("number below 0", lambda n: b"-%d" % n, 2**70),
        Generator("digits", lambda n: b"9" * n),
        Generator("decimals", lambda n: b"0." + b"0" * n + b"1"),
        Generator("exponent", lambda n: b"1e%d" % n, 2**70),
    ]


def _lists() -> list[Generator]:
    def of(name: str, item: bytes) -> Generator:
        return Generator(f"list of {name}", lambda n: b"[" + item + (b"," + item) * (n - 1) + b"]")

    return [
        of("numbers", b"7"),
        of("texts", b'"a"'),
        of(
            "objects",
            b'{"role":"user","type":"text","text":"a","content":"a","name":"a","function":{"name":"a"}}',
        ),
        of("lists", b"[7]"),
        *(of(name, item) for name, item in _ITEMS.items()),
        Generator(
            "list of other numbers", lambda n: b"[" + b",".join(b"%d" % i for i in range(n)) + b"]"
        ),
        Generator(
            "list of other texts", lambda n: b"[" + b",".join(b'"%d"' % i for i in range(n)) + b"]"
        ),
        Generator("list of long texts", lambda n: b'["' + b"a" * n + b'","' + b"a " * n + b'"]'),
    ]


def _objects() -> list[Generator]:
    return [
        Generator(
            "object of keys", lambda n: b"{" + b",".join(b'"%d":1' % i for i in range(n)) + b"}"
        ),
        Generator("object of one key", lambda n: b"{" + b'"a":1' + b',"a":1' * (n - 1) + b"}"),
        Generator("object with a long key", lambda n: b"{" + text("a", n) + b":1}"),
    ]


def _escaped(written: str) -> bytes:
    return json.dumps(written, ensure_ascii=False)[1:-1].encode()
