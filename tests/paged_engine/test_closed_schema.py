"""Which objects of a schema may have properties that it does not list."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.paged_engine.grammar import closed

NAME = {"properties": {"name": {"type": "string"}}}
SHUT = NAME | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (NAME, SHUT),
        ({"type": "object"}, {"type": "object"}),
        (NAME | {"additionalProperties": True}, NAME | {"additionalProperties": True}),
        (NAME | {"additionalProperties": NAME}, NAME | {"additionalProperties": SHUT}),
        (NAME | {"patternProperties": {"^x": {}}}, NAME | {"patternProperties": {"^x": {}}}),
        ({"properties": {"a": NAME}}, {"properties": {"a": SHUT}, "additionalProperties": False}),
        ({"type": "array", "items": NAME}, {"type": "array", "items": SHUT}),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"N": NAME}, "$ref": "#/$defs/N"}, {"$defs": {"N": SHUT}, "$ref": "#/$defs/N"}),
        ({"allOf": [NAME, {"required": ["b"]}]}, {"allOf": [NAME, {"required": ["b"]}]}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
        (
            {"properties": {"items": {"type": "string"}}},
            SHUT | {"properties": {"items": {"type": "string"}}},
        ),
        (True, True),
    ],
)
def test_objects_that_list_their_properties_have_no_others(schema: Any, wanted: Any) -> None:
    before = repr(schema)
    assert closed(schema) == wanted
    assert repr(schema) == before
