"""Formats of tool calls and reasoning by family of models, with vLLM's names; a plugin adds rows."""
# ruff: noqa: RUF001 - DeepSeek's markers are written with these characters

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.openai_api.call_reader import CallTags
from kvrelay.openai_api.message_parts import CallIds
from kvrelay.openai_api.reasoning import (
    HARMONY_MARKERS,
    HarmonySplit,
    Opening,
    ReasoningMarks,
    ReasoningSplit,
)
from kvrelay.openai_api.tool_parsers import (
    CallMarks,
    ListedParser,
    MarkedParser,
    MistralParser,
    Tools,
)
from kvrelay.wire.errors import ConfigError

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ReasoningFormat",
    "ToolFormat",
    "load_plugin",
    "reasoning_format",
    "tool_format",
]

_DEFAULT = "hermes"
_NO_MARKS = CallMarks()
_THINK = ReasoningMarks()
_NAME = r"(?P<name>[^\s<>{}]+)"


@dataclass(frozen=True, slots=True)
class _Format:
    signs: tuple[tuple[str, ...], ...] = ()
    model_types: tuple[str, ...] = ()  # config.json's, or a GGUF file's architecture

    def signed(self, template: str) -> bool:
        return any(all(sign in template for sign in signs) for signs in self.signs)


_F = TypeVar("_F", bound=_Format)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(_Format):
    """A family's tool calls."""

    write: Callable[[str, Mapping[str, Any]], str]
    """Write a call as these models do."""
    parser: type[MarkedParser] | type[ListedParser] = MarkedParser
    marks: CallMarks = _NO_MARKS
    ids: str = "call_{hex}"

    def reader(
        self, ids: CallIds, hidden: tuple[str, ...], tools: Tools
    ) -> MarkedParser | ListedParser:
        return self.parser(ids, hidden, tools, self.marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat(_Format):
    """A family's reasoning."""

    marks: ReasoningMarks = _THINK
    channels: bool = False
    """The answer is in harmony's channels; marks are for constraints."""

    @property
    def markers(self) -> tuple[str, ...]:
        return HARMONY_MARKERS if self.channels else (*self.marks.openers, *self.marks.closers)

    def split(self, begins: Opening) -> ReasoningSplit | HarmonySplit:
        return HarmonySplit() if self.channels else ReasoningSplit(self.marks, begins)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _object(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return _json({"name": name, key: arguments})


def _coder(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _glm(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def _deepseek(head: str, arguments: str, behind: str = "") -> str:
    begin, end = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )
    return f"{begin}{head}{arguments}{behind}{end}"


def _deepseek_marks(head: str, head_end: str) -> CallMarks:
    return CallMarks(
        openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        closers=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        inner=("<｜tool▁sep｜>",),
        head=rf"(?:<｜tool▁call▁begin｜>)?\s*{head}",
        head_end=head_end,
    )


def _kimi(name: str, arguments: Mapping[str, Any]) -> str:
    call = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def _harmony(name: str, arguments: Mapping[str, Any]) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{_json(arguments)}<|call|>"
    )


def _python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


_CODER = ToolFormat(
    write=_coder,
    marks=CallMarks(
        openers=("<tool_call>", "<function="),
        closers=("</tool_call>",),
        head=f"(?:<function=)?{_NAME}>",
        head_end=">",
        tags=CallTags(("<parameter=", ">"), ("", "</parameter>"), "</function>", "\n"),
    ),
    signs=(("<function=", "<parameter="),),
)
_GLM = ToolFormat(
    write=_glm,
    marks=CallMarks(
        openers=("<tool_call>",),
        head=rf"{_NAME}\s*",
        head_end=r"\n|(?=<)",
        tags=CallTags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>"),
    ),
    signs=(("<arg_key>",),),
    model_types=("glm4_moe", "glm4moe"),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "openai": ToolFormat(
        write=_harmony,
        marks=CallMarks(
            openers=("<|channel|>",),
            closers=("<|call|>",),
            inner=("<|constrain|>", "<|message|>"),
            head=rf"[^<]*\bto=(?:functions\.)?{_NAME}[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            head_end=r"<\|message\|>",
        ),
        signs=(("<|channel|>", "<|message|>"),),
        model_types=("gpt_oss", "gpt-oss"),
    ),
    "kimi_k2": ToolFormat(
        write=_kimi,
        marks=CallMarks(
            openers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            inner=("<|tool_call_argument_begin|>",),
            head=r"(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?(?P<name>[^\s<>{}:]+)(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>",
            head_end=r"<\|tool_call_argument_begin\|>",
        ),
        ids="functions.{name}:{index}",
        signs=(("<|tool_call_argument_begin|>",),),
        model_types=("kimi_k2",),
    ),
    "deepseek_v3": ToolFormat(
        write=lambda name, arguments: _deepseek(
            f"function<｜tool▁sep｜>{name}\n```json\n", _json(arguments), "\n```"
        ),
        marks=_deepseek_marks(rf"\w+<｜tool▁sep｜>{_NAME}\s*```json", "```json"),
        signs=(("<｜tool▁sep｜>", "```json"),),
    ),
    "deepseek_v31": ToolFormat(
        write=lambda name, arguments: _deepseek(f"{name}<｜tool▁sep｜>", _json(arguments)),
        marks=_deepseek_marks(rf"{_NAME}<｜tool▁sep｜>", "<｜tool▁sep｜>"),
        signs=(("<｜tool▁sep｜>",),),
        model_types=("deepseek_v3", "deepseek2"),
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
    "mistral": ToolFormat(
        write=lambda name, arguments: f"[TOOL_CALLS]{name}{_json(arguments)}",
        parser=MistralParser,
        marks=CallMarks(openers=("[TOOL_CALLS]",), inner=("[CALL_ID]", "[ARGS]")),
        ids="{short}",
        signs=(("[TOOL_CALLS]",),),
        model_types=("mistral", "mistral3", "ministral3", "mixtral"),
    ),
    "granite": ToolFormat(
        write=lambda name, arguments: f"<|tool_call|>[{_object(name, arguments)}]",
        parser=ListedParser,
        marks=CallMarks(openers=("<|tool_call|>", "<tool_call>")),
        signs=(("<|tool_call|>",),),
        model_types=("granite", "granitemoe"),
    ),
    "hermes": ToolFormat(
        write=lambda name, arguments: f"<tool_call>\n{_object(name, arguments)}\n</tool_call>",
        marks=CallMarks(openers=("<tool_call>",), closers=("</tool_call>",)),
        signs=(("<tool_call>",),),
    ),
    "pythonic": ToolFormat(
        write=_python,
        parser=ListedParser,
        marks=CallMarks(
            openers=("<|python_start|>",), closers=("<|python_end|>",), bare=True, python=True
        ),
        signs=(("[func_name1(",), ("func_name1(params_name1",)),
        model_types=("llama4",),
    ),
    "llama3_json": ToolFormat(
        write=lambda name, arguments: _object(name, arguments, "parameters"),
        parser=ListedParser,
        marks=CallMarks(openers=("<|python_tag|>",), bare=True),
        signs=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
    ),
    "json": ToolFormat(write=_object, parser=ListedParser, marks=CallMarks(bare=True)),
}
"""Formats by names of `--tool-call-parser`; the first with its signs in the template is used."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat(
        marks=ReasoningMarks(
            ("<|channel|>analysis<|message|>",),
            ("<|end|><|start|>assistant<|channel|>final<|message|>",),
        ),
        channels=True,
        signs=(("<|channel|>", "<|message|>"),),
        model_types=("gpt_oss", "gpt-oss"),
    ),
    "kimi_k2": ReasoningFormat(
        marks=ReasoningMarks(ends=("<|tool_calls_section_begin|>",), assumed=True),
        signs=(("<|tool_call_argument_begin|>", "<think>"),),
    ),
    "granite": ReasoningFormat(
        marks=ReasoningMarks(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        signs=(("Here is my thought process:",), ("Here's my thought process:",)),
    ),
    "mistral": ReasoningFormat(
        marks=ReasoningMarks(("[THINK]",), ("[/THINK]",)), signs=(("[THINK]",),)
    ),
    "seed_oss": ReasoningFormat(
        marks=ReasoningMarks(("<seed:think>",), ("</seed:think>",)), signs=(("<seed:think>",),)
    ),
    "glm45": ReasoningFormat(signs=(("<arg_key>", "<think>"), ("[gMASK]", "<think>"))),
    "deepseek_r1": ReasoningFormat(
        marks=ReasoningMarks(assumed=True), signs=(("<｜Assistant｜><think>",),)
    ),
    "deepseek_v3": ReasoningFormat(signs=(("<｜Assistant｜>", "</think>"),)),
    "qwen3": ReasoningFormat(signs=(("<think>",), ("</think>",))),
}
"""Formats by names of `--reasoning-parser`."""


def tool_format(asked: str, template: str | None, model_type: str) -> tuple[str, ToolFormat] | None:
    """Return a format and its name: for `auto` the model's, else hermes. Raises ConfigError."""
    if asked != "auto":
        return _asked("tool-call-parser", TOOL_FORMATS, asked)
    return _chosen(TOOL_FORMATS, template, model_type) or (_DEFAULT, TOOL_FORMATS[_DEFAULT])


def reasoning_format(
    asked: str, template: str | None, model_type: str
) -> tuple[str, ReasoningFormat] | None:
    """Return a format and its name: for `auto` the model's, if any. Raises ConfigError."""
    if asked != "auto":
        return _asked("reasoning-parser", REASONING_FORMATS, asked)
    return _chosen(REASONING_FORMATS, template, model_type)


def load_plugin(path: str) -> None:
    """Run an operator's Python file, which adds rows. Raises ConfigError."""
    try:
        spec = importlib.util.spec_from_file_location(
            "kvrelay_tool_parser_plugin", Path(path).expanduser()
        )
        if spec is None or spec.loader is None:
            raise ConfigError(f"the plugin {path} must be a Python file, ending with .py")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ConfigError:
        raise
    except Exception as why:  # the code is the operator's and can raise anything
        raise ConfigError(f"the plugin {path} cannot be run: {type(why).__name__}: {why}") from why


def _asked(flag: str, formats: Mapping[str, _F], name: str) -> tuple[str, _F] | None:
    if name == "none":
        return None
    if name not in formats:
        known = ", ".join(("auto", "none", *formats))
        raise ConfigError(
            f"--{flag} {name!r} is not one of {known}; --tool-parser-plugin FILE can add it"
        )
    return name, formats[name]


def _chosen(
    formats: Mapping[str, _F], template: str | None, model_type: str
) -> tuple[str, _F] | None:
    # The template comes first: models of one type were taught different formats.
    for name, row in formats.items():
        if row.signed(template or ""):
            return name, row
    return next(
        ((name, row) for name, row in formats.items() if model_type in row.model_types), None
    )
