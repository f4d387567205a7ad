"""Constraints of an answer: response_format, structured_outputs, guided_*.

paged_engine/grammar.py decides whether a schema, regex or grammar can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvrelay.openai_api.tool_choice import tool_use
from kvrelay.openai_api.types import ChatRequest, ResponseFormat, SamplingFields
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import Constraint, ConstraintKind

__all__ = ["bad_word_ids", "constraint_of"]

_ANY_OBJECT = '{"type":"object"}'
# Keys of structured_outputs.
_KINDS: dict[str, ConstraintKind] = {
    "json": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json",
    "structural_tag": "tags",
}
_NO_WHITESPACE, _WHITESPACE = "disable_any_whitespace", "whitespace_pattern"
_MAX_TAGS = 128


def constraint_of(request: SamplingFields) -> Constraint | None:
    """Return the one constraint of a request. Raises RequestError, also for several."""
    # With a forced tool call there is no message to format.
    forced = list(_forced_calls(request)) or list(_response_format(request.response_format))
    found = [*forced, *_guided(request), *_structured(request.structured_outputs)]
    if len(found) > 1:
        names = " and ".join(constraint.field for constraint in found)
        raise RequestError(
            f"{names} are given at once; the form of an answer can be asked for in one way only",
            param=found[1].field,
        )
    whitespace = request.guided_whitespace_pattern
    if whitespace is None:
        return found[0].check() if found else None
    if not found or found[0].kind != "json":
        raise RequestError(
            "guided_whitespace_pattern is about JSON; ask for JSON with guided_json or "
            "response_format",
            param="guided_whitespace_pattern",
        )
    return msgspec.structs.replace(found[0], whitespace=whitespace).check()


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
    elif asked.type == "json_schema":
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            raise RequestError(
                "response_format of type json_schema needs json_schema: {name, schema}",
                param="response_format.json_schema",
            )
        yield Constraint("json", _json(asked.json_schema.schema_))
    else:
        yield _tags({"structures": asked.structures, "triggers": asked.triggers}, "response_format")


def _guided(request: SamplingFields) -> Iterator[Constraint]:
    kinds: tuple[ConstraintKind, ...] = ("json", "regex", "choice", "grammar")
    for kind in kinds:
        value = getattr(request, f"guided_{kind}")
        if value is not None and value != []:
            yield _of(kind, value, f"guided_{kind}")


def _structured(asked: dict[str, Any] | None) -> Iterator[Constraint]:
    given = {
        key: value
        for key, value in (asked or {}).items()
        if value is not None and value is not False
    }
    whitespace = "" if given.pop(_NO_WHITESPACE, False) is True else given.pop(_WHITESPACE, None)
    for key, value in given.items():
        field = f"structured_outputs.{key}"
        if key not in _KINDS:
            raise RequestError(
                f"structured_outputs must hold one of {', '.join(_KINDS)}; {key!r} is not supported",
                param=field,
            )
        kind = _KINDS[key]
        if key == "json_object":
            value = _ANY_OBJECT
        found = _of(kind, value, field)
        if whitespace is not None:
            if kind != "json" or not isinstance(whitespace, str):
                raise RequestError(
                    f"{_WHITESPACE} is a regular expression and goes with json", param=field
                )
            found = msgspec.structs.replace(found, whitespace=whitespace)
        yield found


def _of(kind: ConstraintKind, value: Any, field: str) -> Constraint:
    if kind == "json":
        if isinstance(value, str):
            return Constraint(kind, value, field=field)
        if isinstance(value, dict | bool):
            return Constraint(kind, _json(value), field=field)
        raise RequestError(f"{field} must be a JSON schema, as an object or as text", param=field)
    if kind == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(choice, str) for choice in value)
        ):
            raise RequestError(f"{field} must be a list of strings that is not empty", param=field)
        return Constraint(kind, _json(value), field=field)
    if kind == "tags":
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError as why:
                raise RequestError(f"{field} is not valid JSON: {why}", param=field) from why
        return _tags(value, field)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{field} must be a text that is not empty", param=field)
    return Constraint(kind, value, field=field)


class _Tag(msgspec.Struct, frozen=True):
    begin: str
    schema_: dict[str, Any] | bool = msgspec.field(name="schema")
    end: str = ""


class _Tags(msgspec.Struct, frozen=True):
    structures: list[_Tag]
    triggers: list[str]


def _tags(value: Any, field: str) -> Constraint:
    try:
        tags = msgspec.convert(value, _Tags)
    except msgspec.ValidationError as why:
        raise RequestError(
            f"{field} must hold structures, a list of {{begin, schema, end}}, and triggers, a list "
            f"of texts with which they begin: {why}",
            param=field,
        ) from why
    for name, count in (("structures", len(tags.structures)), ("triggers", len(tags.triggers))):
        if count > _MAX_TAGS:
            raise RequestError(
                f"{field} holds {count} {name}; the limit is {_MAX_TAGS}", param=field
            )
    for trigger in tags.triggers:
        if not trigger or not any(tag.begin.startswith(trigger) for tag in tags.structures):
            raise RequestError(
                f"{field}: no structure begins with the trigger {trigger!r}", param=field
            )
    for tag in tags.structures:
        if not any(tag.begin.startswith(trigger) for trigger in tags.triggers):
            raise RequestError(
                f"{field}: {tag.begin!r} begins with none of the triggers", param=field
            )
    if not tags.structures:
        raise RequestError(f"{field} holds no structure", param=field)
    return Constraint("tags", _json(tags), field=field)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
