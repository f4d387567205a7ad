"""Programs of any size in the languages that requests may speak: schemas, expressions, grammars,
templates.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.soak.fuzz.sizes import UNITS
from tests.soak.fuzz.table import Route

__all__ = ["LANGUAGES", "NUMBERED", "Program", "Site", "sites"]

Program = Callable[[int], str]


@dataclass(frozen=True)
class Site:
    """Fields of a request in which a program stands, where `%s` is; `as_text`: as a JSON string."""

    language: str
    fields: Mapping[str, str]
    as_text: bool = False

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value[:60]}" for name, value in self.fields.items())

    def body(self, route: Route, program: str) -> bytes:
        written = json.dumps(program, ensure_ascii=False) if self.as_text else program
        return route.body(
            {name: value.replace("%s", written).encode() for name, value in self.fields.items()}
        )


def sites(route: Route) -> list[Site]:
    known = set(route.fields)
    return [site for site in _SITES if set(site.fields) <= known]


_FORMAT = '{"type":"json_schema","name":"a","schema":%s}'
_TOOL = '{"type":"function","name":"f","input_schema":%s,"parameters":%s,"function":{"name":"f","parameters":%s}}'
_SITES = (
    Site("schema", {"response_format": '{"type":"json_schema","json_schema":' + _FORMAT + "}"}),
    Site("schema", {"text": '{"format":' + _FORMAT + "}"}),
    Site("schema", {"output_config": '{"format":' + _FORMAT + "}"}),
    Site("schema", {"structured_outputs": '{"json":%s}'}),
    Site("schema", {"tool_choice": '"required"', "tools": f"[{_TOOL}]"}),
    Site(
        "schema",
        {
            "tool_choice": '{"type":"function","name":"f","function":{"name":"f"}}',
            "tools": f"[{_TOOL}]",
        },
    ),
    Site("schema", {"tool_choice": '{"type":"any"}', "tools": f"[{_TOOL}]"}),
    Site("regex", {"structured_outputs": '{"regex":%s}'}, as_text=True),
    Site("regex", {"structured_outputs": '{"json":{},"whitespace_pattern":%s}'}, as_text=True),
    Site("regex", {"structured_outputs": '{"json":{"type":"string","pattern":%s}}'}, as_text=True),
    Site("grammar", {"structured_outputs": '{"grammar":%s}'}, as_text=True),
    Site("choice", {"structured_outputs": '{"choice":%s}'}),
    Site("messages", {"messages": "%s"}),
    Site("messages", {"input": "%s"}),
    Site("tools", {"tools": "%s"}),
    Site("template", {"chat_template": "%s"}, as_text=True),
)


def _many(item: str, before: str = "", behind: str = "", between: str = ",") -> Program:
    def made(n: int) -> str:
        if "%" not in item:
            return before + item + (between + item) * (n - 1) + behind
        every = (item.replace("%d", str(at)).replace("%+", str(at + 1)) for at in range(n))
        return before + between.join(every) + behind.replace("%+", str(n))

    return made


def _nest(opening: str, core: str, closing: str, before: str = "", behind: str = "") -> Program:
    return lambda n: before + opening * n + core + closing * n + behind


def _number(around: str) -> Program:
    return lambda n: around.replace("%d", str(n))


def _chain(link: str, last: str) -> Program:
    return _many(f'"d%d":{link}', '{"$ref":"#/$defs/d0","$defs":{', f',"d%+":{last}}}}}')


def _schemas() -> dict[str, Program]:
    to = '{"$ref":"#/$defs/d%+"}'
    found = {
        "refs in a chain": _chain(to, "true"),
        "refs in a circle": _chain(to, '{"$ref":"#/$defs/d0"}'),
        "refs through properties": _chain(
            f'{{"properties":{{"a":{to}}},"required":["a"]}}', "true"
        ),
        "refs to one definition": _many(
            '{"$ref":"#/$defs/d"}', '{"$defs":{"d":true},"prefixItems":[', "]}"
        ),
        "nested objects": _nest('{"type":"object","properties":{"a":', "true", "}}"),
        "nested arrays": _nest('{"type":"array","items":', "true", "}"),
        "properties": _many('"%d":true', '{"type":"object","properties":{', "}}"),
        "required": _many('"%d"', '{"type":"object","required":[', "]}"),
        "prefixItems": _many("true", '{"type":"array","prefixItems":[', "]}"),
        "enum": _many('"v%d"', '{"enum":[', "]}"),
        "unknown keywords": _many('"k%d":true', "{", "}"),
    }
    for word in ("anyOf", "allOf", "oneOf"):
        found[f"refs through {word}"] = _chain(f'{{"{word}":[{to},{to}]}}', "true")
        found[f"nested {word}"] = _nest(f'{{"{word}":[', "true", "]}")
        found[word] = _many('{"minLength":%d}', f'{{"{word}":[', "]}")
    return found


_SCHEMA_NUMBERS = {
    word: _number(f'{{"type":"{kind}","{word}":%d}}')
    for kind, words in {
        "string": ("minLength", "maxLength"),
        "array": ("minItems", "maxItems"),
        "object": ("minProperties", "maxProperties"),
        "integer": ("minimum", "maximum", "multipleOf"),
    }.items()
    for word in words
}


def _regexes() -> dict[str, Program]:
    nested = {"groups": ")", "stars": ")*", "counts": "){9}", "ranges": "){1,100}"}
    units = (*UNITS, "(a*)*", "(.*a)", "[^a]", r"\p{Lu}*", r"(a)\1", "(?=a)", "a{9,99}", ".{0,9}")
    return {
        **{f"nested {name}": _nest("(", "a", closing) for name, closing in nested.items()},
        "nested alternatives": _nest("(a|", "b", ")"),
        "alternatives": _many("a%d", between="|"),
        "class": lambda n: "[" + "".join(chr(0x100 + 2 * at % 0x5000) for at in range(n)) + "]*",
        "a long way back": _many("(a|b)", "(a|b)*a", "", ""),
        **{f"{unit!r} repeated": _many(unit, between="") for unit in dict.fromkeys(units)},
    }


def _left_recursive(first: str, colon: str, last: str) -> Program:
    def made(n: int) -> str:
        names = [f"r{at}" for at in range(max(1, n - 3))]
        ways = "\n".join(f"{name} {colon} s x | {names[at - 1]} x" for at, name in enumerate(names))
        return f"{first}\ns {colon} x | {' | '.join(names)}\n{ways}\nx {colon} {last}\n"

    return made


def _grammars() -> dict[str, Program]:
    found: dict[str, Program] = {}
    for name, start, colon, class_ in (
        ("Lark", "start", ":", "/[ab]/"),
        ("GBNF", "root", "::=", "[ab]"),
    ):
        rule = f"{start} {colon} "
        short = f'{rule}"a"\n'

        def chain(link: str, last: str, colon: str = colon, rule: str = rule) -> Program:
            return _many(f"r%d {colon} {link}\n", f"{rule}r0\n", f"r%+ {colon} {last}\n", "")

        ways = {
            "rules in a chain": chain("r%+", '"a"'),
            "rules in a circle": chain("r%+", "r0"),
            "rules that double": chain("r%+ r%+", '"a"'),
            "alternatives": _many('"a%d"', rule, "\n", " | "),
            "rules in each other": _left_recursive(f"{rule}s", colon, class_),
            "rules in each other, behind a text": _left_recursive(f'{rule}"a" s', colon, class_),
            "recursion to the left": _many(f'{start} "a"', rule, ' | "a"\n', " | "),
            "sequence": _many('"a"', rule, "\n", " "),
            "nested groups": _nest("(", '"a"', ")", rule, "\n"),
            "a long text": _many("a", f'{rule}"', '"\n', ""),
            "same rule": _many(short, between=""),
        }
        for unit in (*UNITS, "# x\n", "// x\n", "\n ", "\t"):
            ways[f"{unit!r} before"] = _many(unit, "", short, "")
            ways[f"{unit!r} behind"] = _many(unit, short, "", "")
        found |= {f"{name}: {way}": program for way, program in ways.items()}
    return found | {
        "Lark: imports": _many("%import common.INT\n", "", "start: INT\n", ""),
        "Lark: terminals in a chain": _many("T%d: T%+\n", "start: T0\n", 'T%+: "a"\n', ""),
        "Lark: an expression": _many("a?", "start: /", "/\n", ""),
        "Lark: nested counts": _nest("(", '"a"', ")~1..9", "start: ", "\n"),
        "Lark: JSON inside": _nest('{"type":"array","items":', "true", "}", "start: %json ", "\n"),
        "Lark: Lark inside": _nest("%lark {\nstart: ", '"a"', "\n}", "start: ", "\n"),
        "GBNF: a class": _many("a-z", "root ::= [", "]\n", ""),
    }


_CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}'
_ARGUMENTS = '[{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":'
_NAMED = (
    '{"type":"function","name":"f%d","input_schema":{},"function":{"name":"f%d","parameters":{}}}'
)

LANGUAGES: Mapping[str, Mapping[str, Program]] = {
    "schema": _schemas(),
    "regex": _regexes(),
    "grammar": _grammars(),
    "choice": {
        "choices": _many('"c%d"', "[", "]"),
        "one choice": _many("a", '["', '"]', ""),
        "same choice": _many('"a"', "[", "]"),
        "choices that begin alike": lambda n: json.dumps(["a" * (at % 50) for at in range(n)]),
    },
    "messages": {
        "turns": _many('{"role":"user","content":"a"}', "[", "]"),
        "turns of other roles": _many('{"role":"r%d","content":"a"}', "[", "]"),
        "calls": _many(_CALL, '[{"role":"assistant","tool_calls":[', "]}]"),
        "parts": _many('{"type":"text","text":"a"}', '[{"role":"user","content":[', "]}]"),
        "deep arguments": lambda n: _ARGUMENTS + json.dumps(_nest('{"a":', "1", "}")(n)) + "}}]}]",
        "long arguments": _many("a", _ARGUMENTS + '"{\\"a\\":\\"', '\\"}"}}]}]', ""),
    },
    "tools": {
        "tools": _many(_NAMED, "[", "]"),
        "a long description": lambda n: (
            f"[{_TOOL.replace('%s', json.dumps({'description': 'a ' * n}))}]"
        ),
        "deep parameters": lambda n: (
            "[" + _TOOL.replace("%s", _nest('{"properties":{"a":', "true", "}}")(n)) + "]"
        ),
    },
    "template": {
        "nested loops": _nest("{% for i in range(9) %}", "a", "{% endfor %}"),
        "doubling": _many("{% set x = x ~ x %}", "{% set x = 'aa' %}", "{{ x|length }}", ""),
        "recursion": _many("{{ m() }}", "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}", "", ""),
        "parentheses": _nest("(", "1", ")", "{{ ", " }}"),
        "replacements": _many("|replace('a','aa')", "{{ 'a'", "|length }}", ""),
        "blank lines": _many("\n ", "{{- 1 -}}", "{%- if 1 -%}a{%- endif -%}", ""),
        "a long text": _many("a", between=""),
    },
}
"""Programs whose size is how much of them there is."""

NUMBERED: Mapping[str, Mapping[str, Program]] = {
    "schema": _SCHEMA_NUMBERS,
    "regex": {
        "count": _number("a{%d}"),
        "range": _number("(a?b?){0,%d}"),
        "count of counts": _number("((.{%d}){%d})"),
    },
    "grammar": {
        "Lark: count": _number('start: "a"~%d\n'),
        "GBNF: count": _number('root ::= "a"{%d}\n'),
    },
    "template": {
        "a long loop": _number("{% for i in range(%d) %}a{% endfor %}"),
        "loops of loops": _number(
            "{% for i in range(%d) %}{% for j in range(%d) %}{{ 'a' * %d }}{% endfor %}{% endfor %}"
        ),
        "a product": _number("{{ 'a' * %d }}"),
        "a power": _number("{{ 9 ** %d }}"),
        "a width": _number("{{ '%0%dd' % 1 }}"),
    },
}
"""Programs whose size is a number in them."""
