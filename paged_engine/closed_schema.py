"""JSON schemas as answers are held to them: an object that lists its properties has no others.
Pure.

By the standard such an object may have any others, and a small model, once it has begun to invent
them, goes on until its limit. Structured output of the peers closes objects, too. A schema that
says what else may be there is left alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["closed"]

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
# With one of them a property may be known from elsewhere.
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
    """The schema with `additionalProperties: false` wherever properties are listed and nothing says
    what else may be.

    What stands in an `allOf` stays open: another part of it may list the rest.
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
