"""Constraints of an answer: tools and their choice, response_format, structured_outputs, bad_words.

paged_engine/grammar.py decides whether one can be followed. Pure and light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec

from kvrelay.openai_api.json_body import one_of, wrong_value
from kvrelay.openai_api.types import (
    ChatRequest,
    NamedTool,
    ResponseFormat,
    SamplingFields,
    ShortText,
    StructuredOutputs,
)
from kvrelay.wire.errors import RequestError
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import Constraint, ConstraintKind

__all__ = ["Choice", "ToolUse", "bad_word_ids", "constraint_of", "tool_use"]

_NO_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's tools; `name` of the named one. Without `parallel` there is one call at most."""

    choice: Choice = "none"
    tools: tuple[JsonObject, ...] = ()
    """The tools as the client wrote them; empty with none."""
    name: str = ""
    parallel: bool = True

    def schema(self) -> JsonObject | None:
        """Return the content's JSON schema; None for none and auto. Raises RequestError.

        Named: of the arguments. Required: of a list of {"name", "parameters"}.
        """
        if self.choice == "named":
            return dict(
                next(
                    _parameters(tool)
                    for tool in self.tools
                    if tool["function"]["name"] == self.name
                )
            )
        if self.choice != "required":
            return None
        try:
            calls = [_call_schema(i, tool) for i, tool in enumerate(self.tools)]
        except RecursionError as why:
            raise RequestError(
                "tools hold a schema that nests too deeply; send fewer levels", param="tools"
            ) from why
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return schema if self.parallel else {**schema, "maxItems": 1}


def tool_use(request: ChatRequest) -> ToolUse:
    """Return what a request asks of tools. Raises RequestError."""
    tools, wanted = request.tools, request.tool_choice
    names = _checked_names(tools or ())
    name = wanted.function.name if isinstance(wanted, NamedTool) else None
    # An empty list of tools is a client's way to have none, whatever else it sends.
    nothing = wanted is None if tools is None else not tools
    if wanted == "none" or (nothing and name is None):
        return ToolUse()
    if not names:
        raise RequestError(
            "tool_choice needs tools; send both or leave it out", param="tool_choice"
        )
    if name is not None and name not in names:
        raise RequestError(
            f"tool_choice names the tool {name!r}, which is not among the tools: {', '.join(names)}",
            param="tool_choice",
        )
    choice = cast("Choice", (wanted or "auto") if name is None else "named")
    return ToolUse(choice, tuple(tools or ()), name or "", request.parallel_tool_calls is not False)


class _Function(msgspec.Struct):
    name: ShortText
    parameters: JsonObject | None = None


class _Tool(msgspec.Struct):
    type: Annotated[str, one_of("function")]
    function: _Function


def _checked_names(tools: Sequence[JsonObject]) -> list[str]:
    try:
        names = [tool.function.name for tool in msgspec.convert(tools, list[_Tool])]
    except msgspec.ValidationError as why:
        raise wrong_value(str(why), tools, "tools") from why
    for i, name in enumerate(names):
        if not name.isprintable():
            where = f"tools[{i}].function.name"
            raise RequestError(f"{where} must be printable, got {name!r}", param=where)
        if name in names[:i]:
            raise RequestError(
                f"tools[{i}]: there are two tools {name!r}; names must differ", param="tools"
            )
    return names


def _parameters(tool: JsonObject) -> JsonObject:
    found: JsonObject = tool["function"].get("parameters") or _NO_PARAMETERS
    return found if "type" in found or "$ref" in found else {"type": "object", **found}


def _call_schema(index: int, tool: JsonObject) -> JsonObject:
    # A schema's own references start at its root, which lies deeper here.
    root = f"#/items/anyOf/{index}/properties/parameters"
    parameters = _moved(
        {k: v for k, v in _parameters(tool).items() if k not in ("$id", "$schema")}, root
    )
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(value: Any, root: str) -> Any:
    # References must hold where the schema stands at `root` of another one.
    if isinstance(value, Mapping):
        return {
            key: root + below[1:]
            if key == "$ref" and isinstance(below, str) and below.startswith("#")
            else _moved(below, root)
            for key, below in value.items()
        }
    return [_moved(each, root) for each in value] if isinstance(value, list) else value


_ANY_OBJECT = '{"type":"object"}'


def constraint_of(request: SamplingFields) -> Constraint | None:
    """Return the one constraint of a request. Raises RequestError, also for several."""
    # With a forced tool call there is no message to format.
    forced = list(_forced_calls(request)) or list(_response_format(request.response_format))
    found = [*forced, *_structured(request.structured_outputs or StructuredOutputs())]
    if len(found) > 1:
        names = " and ".join(constraint.field for constraint in found)
        raise RequestError(
            f"{names} are given at once; the form of an answer can be asked for in one way only",
            param=found[1].field,
        )
    return found[0].check() if found else None


def bad_word_ids(
    words: list[str] | None, encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return each word's token ids, alone and after a space. Raises RequestError for spaces alone."""
    found: dict[tuple[int, ...], None] = {}
    for word in words or ():
        if not word.strip():
            raise RequestError(
                f"bad_words holds {word!r}, which is nothing but spaces; leave it out",
                param="bad_words",
            )
        for text in (word.lstrip(), f" {word.lstrip()}"):
            found[tuple(encode(text))] = None
    return tuple(found)


def _forced_calls(request: SamplingFields) -> Iterator[Constraint]:
    schema = tool_use(request).schema() if isinstance(request, ChatRequest) else None
    if schema is not None:
        yield Constraint("json", _json(schema), field="tool_choice")


def _response_format(asked: ResponseFormat | None) -> Iterator[Constraint]:
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield Constraint("json", _ANY_OBJECT)
    else:
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            raise RequestError(
                "response_format of type json_schema needs json_schema: {name, schema}",
                param="response_format.json_schema",
            )
        yield Constraint("json", _json(asked.json_schema.schema_))


def _structured(asked: StructuredOutputs) -> Iterator[Constraint]:
    if asked.structural_tag is not None:
        raise RequestError(
            "structural_tag is not served; send json, regex, choice or grammar instead",
            param="structured_outputs.structural_tag",
        )
    kinds: tuple[tuple[str, ConstraintKind, Any], ...] = (
        ("json", "json", asked.json),
        ("regex", "regex", asked.regex),
        ("choice", "choice", asked.choice),
        ("grammar", "grammar", asked.grammar),
        ("json_object", "json", asked.json_object and _ANY_OBJECT),
    )
    whitespace = "" if asked.disable_any_whitespace else asked.whitespace_pattern
    for name, kind, value in kinds:
        if value is None or value is False:
            continue
        field = f"structured_outputs.{name}"
        if whitespace is not None and kind != "json":
            raise RequestError(
                "whitespace_pattern is a regular expression and goes with json", param=field
            )
        text = value if isinstance(value, str) else _json(value)
        yield Constraint(kind, text, field=field, whitespace=whitespace)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
