"""Constraints of an answer: response_format, structured_outputs.

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
}
_NO_WHITESPACE, _WHITESPACE = "disable_any_whitespace", "whitespace_pattern"


def constraint_of(request: SamplingFields) -> Constraint | None:
    """Return the one constraint of a request. Raises RequestError, also for several."""
    # With a forced tool call there is no message to format.
    forced = list(_forced_calls(request)) or list(_response_format(request.response_format))
    found = [*forced, *_structured(request.structured_outputs)]
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
    if not isinstance(value, str) or not value:
        raise RequestError(f"{field} must be a text that is not empty", param=field)
    return Constraint(kind, value, field=field)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
