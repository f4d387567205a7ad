"""What a request asks of tools: checked at the door, and as a JSON schema where the answer is
constrained.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.openai_api.body import decode_chat
from kvrelay.openai_api.constraints import ToolUse, tool_use
from kvrelay.openai_api.types import ChatRequest
from kvrelay.wire.errors import RequestError


def tool(name: Any, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = (
        {"name": name, **more}
        if parameters is None
        else {"name": name, **more, "parameters": parameters}
    )
    return {"type": "function", "function": function}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("weather", CITY, description="Weather", strict=True), tool("now")]
NAMED = {"type": "function", "function": {"name": "weather"}}


def asked(**fields: Any) -> ToolUse:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return tool_use(decode_chat(json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("fields", "choice", "name"),
    [
        ({}, "none", ""),
        ({"tools": []}, "none", ""),
        ({"tool_choice": "none"}, "none", ""),
        ({"tools": [], "tool_choice": "required"}, "none", ""),
        ({"tools": TOOLS, "tool_choice": "none"}, "none", ""),
        ({"tools": TOOLS}, "auto", ""),
        ({"tools": TOOLS, "tool_choice": "required"}, "required", ""),
        ({"tools": TOOLS, "tool_choice": NAMED}, "named", "weather"),
    ],
)
def test_choices(fields: dict[str, Any], choice: str, name: str) -> None:
    use = asked(**fields)
    assert (use.choice, use.name) == (choice, name)
    assert list(use.tools) == ([] if choice == "none" else TOOLS)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x" * 300}}},
            "tool_choice.function.name",
            "at most 256 characters",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.type",
            "allowed_tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x', which is not among the tools: weather, now",
        ),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "wrong type"),
        ({"tools": {"a": 1}}, "tools", "wrong type"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            'must be function, got "web_search"',
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [*TOOLS, tool("")]}, "tools[2].function.name", 'at least 1 character, got ""'),
        ({"tools": [tool("x" * 300)]}, "tools[0].function.name", "at most 256 characters"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name", "printable"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "two tools 'f'"),
        ({"tools": [tool("f")] * 2000}, "tools", "at most 1024 entries, got 2000"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        asked(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert said in refused.value.message


@pytest.mark.parametrize("call", [{}, {"function": None}, {"function": {"arguments": "{}"}}])
def test_past_calls_must_name_a_function(call: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(RequestError) as refused:
        asked(messages=messages)
    assert refused.value.param == "messages[1].tool_calls[0].function"


def test_a_deep_schema_is_refused_and_not_a_crash() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nests too deeply"):
        ToolUse("required", (tool("f", deep),)).schema()
    with pytest.raises(RequestError, match="wrong type"):
        tool_use(ChatRequest(messages=[], tools=[{"type": deep}]))


def test_only_forced_calls_constrain() -> None:
    assert asked(tools=TOOLS).schema() is None
    assert asked().schema() is None


def test_a_named_tool_constrains_to_its_arguments_alone() -> None:
    assert asked(tools=TOOLS, tool_choice=NAMED).schema() == CITY
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    named = {"type": "function", "function": {"name": "now"}}
    assert asked(tools=TOOLS, tool_choice=named).schema() == nothing
    # Arguments are an object, also where the schema leaves it open.
    loose = asked(tools=[tool("now", {"properties": {}})], tool_choice=named).schema()
    assert loose == {"type": "object", "properties": {}}


def test_required_constrains_to_a_list_of_calls() -> None:
    schema = asked(tools=TOOLS, tool_choice="required").schema()
    assert schema is not None
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "weather"}, "parameters": CITY}
    assert list(first["properties"]) == ["name", "parameters"]
    assert first["required"] == ["name", "parameters"]
    assert second["properties"]["name"] == {"const": "now"}
    one = asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).schema()
    assert one == {**schema, "maxItems": 1}


def test_references_within_a_tools_schema_still_hold() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "top": {"$ref": "#"}},
    }
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}, "far": {"$ref": "https://example.org/x"}},
        "$defs": {"node": node},
    }
    schema: Any = asked(tools=[tool("a"), tool("f", parameters)], tool_choice="required").schema()
    moved = schema["items"]["anyOf"][1]["properties"]["parameters"]
    assert moved["properties"]["far"] == {"$ref": "https://example.org/x"}
    assert moved["properties"]["root"] == {
        "$ref": "#/items/anyOf/1/properties/parameters/$defs/node"
    }
    assert "$schema" not in moved
    root = {"$ref": "#/items/anyOf/1/properties/parameters"}
    assert moved["$defs"]["node"]["properties"]["top"] == root
    assert parameters["properties"]["root"] == {"$ref": "#/$defs/node"}
