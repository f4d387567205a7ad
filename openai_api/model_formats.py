"""Formats of tool calls and reasoning by family of models, with vLLM's names; a plugin adds rows."""

# ruff: noqa: RUF001 - DeepSeek's markers are written with these characters

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvrelay.wire.errors import ConfigError

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Opening",
    "ReasoningFormat",
    "ToolFormat",
    "load_plugin",
    "reasoning_format",
    "tool_format",
]

_DEFAULT = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A family's tool calls: objects, or arguments behind a head with the name."""

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    """Markers behind calls, never content there."""
    inner: tuple[str, ...] = ()
    """Further markers to render as special tokens."""
    head: str | None = None
    """Pattern with a group `name` of what may stand before arguments."""
    tagged: bool = False
    """Arguments behind a head are `<parameter=KEY>` tags."""
    bare: bool = False
    """The text may begin with a call."""
    short_ids: bool = False
    signs: tuple[tuple[str, ...], ...] = ()
    """A chat template with all texts of one of these is the family's."""
    model_types: tuple[str, ...] = ()
    """Types in config.json, or a GGUF file's architecture."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openers, *self.closers, *self.inner)


class Opening(enum.Enum):
    """A beginning of an answer, as far as its prompt shows."""

    INSIDE = enum.auto()
    """The prompt has opened reasoning."""
    BEHIND = enum.auto()
    """The prompt has closed reasoning, which switches it off."""
    FREE = enum.auto()
    """The model may open reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A family's reasoning, between markers; the first of each are those that models write."""

    openers: tuple[str, ...] = ("<think>",)
    closers: tuple[str, ...] = ("</think>",)
    assumed: bool = False
    """The answer begins with reasoning."""
    signs: tuple[tuple[str, ...], ...] = ()
    model_types: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openers, *self.closers)

    def opening(self, prompt_end: str) -> Opening:
        end = prompt_end.rstrip()
        if end.endswith(self.closers):
            return Opening.BEHIND
        return Opening.INSIDE if self.assumed or end.endswith(self.openers) else Opening.FREE


_CODER = ToolFormat(
    openers=("<tool_call>", "<function="),
    closers=("</tool_call>",),
    head=r"(?P<name>[^\s<>{}]+)>",
    tagged=True,
    signs=(("<function=", "<parameter="),),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": ToolFormat(
        openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        closers=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        inner=("<｜tool▁sep｜>",),
        head=r"\w+<｜tool▁sep｜>(?P<name>[^\s<>{}`]+)\s*```json\s*(?=\{)",
        signs=(("<｜tool▁sep｜>", "```json"),),
    ),
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
    "mistral": ToolFormat(
        openers=("[TOOL_CALLS]",),
        inner=("[CALL_ID]", "[ARGS]"),
        # The call's id is unused.
        head=r"(?P<name>[^\s{}\[\]]+)(?:\[CALL_ID\][^\s{}\[\]]*)?(?:\[ARGS\])?\s*(?=\{)",
        short_ids=True,
        signs=(("[TOOL_CALLS]",),),
        model_types=("mistral", "mixtral"),
    ),
    "hermes": ToolFormat(
        openers=("<tool_call>",), closers=("</tool_call>",), signs=(("<tool_call>",),)
    ),
    "llama3_json": ToolFormat(
        openers=("<|python_tag|>",),
        bare=True,
        signs=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
    ),
    "json": ToolFormat(bare=True),
}
"""Formats by names of `--tool-call-parser`; the first with its signs in the template is used."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "mistral": ReasoningFormat(openers=("[THINK]",), closers=("[/THINK]",), signs=(("[THINK]",),)),
    "deepseek_r1": ReasoningFormat(
        assumed=True,
        signs=(("<｜Assistant｜><think>",),),
    ),
    "qwen3": ReasoningFormat(signs=(("<think>",), ("</think>",))),
}
"""Formats by names of `--reasoning-parser`."""

_F = TypeVar("_F", ToolFormat, ReasoningFormat)


def tool_format(asked: str, template: str | None, model_type: str) -> tuple[str, ToolFormat] | None:
    """Return a format and its name: for `auto` the model's, else hermes. Raises ConfigError."""
    found = _chosen("tool-call-parser", TOOL_FORMATS, asked, template, model_type)
    return found or ((_DEFAULT, TOOL_FORMATS[_DEFAULT]) if asked == "auto" else None)


def reasoning_format(
    asked: str, template: str | None, model_type: str
) -> tuple[str, ReasoningFormat] | None:
    """Return a format and its name: for `auto` the model's, if any. Raises ConfigError."""
    return _chosen("reasoning-parser", REASONING_FORMATS, asked, template, model_type)


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


def _chosen(
    flag: str, formats: Mapping[str, _F], asked: str, template: str | None, model_type: str
) -> tuple[str, _F] | None:
    if asked == "none":
        return None
    if asked in formats:
        return asked, formats[asked]
    if asked != "auto":
        known = ", ".join(("auto", "none", *formats))
        raise ConfigError(
            f"--{flag} {asked!r} is not one of {known}; --tool-parser-plugin FILE can add it"
        )
    # The template comes first: models of one type were taught different formats.
    for name, row in formats.items():
        if any(all(sign in (template or "") for sign in signs) for signs in row.signs):
            return name, row
    return next(
        ((name, row) for name, row in formats.items() if model_type in row.model_types), None
    )
