"""Tool calls through a router and two nodes, with a model of random weights that is held to what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from real_cluster import Cluster, running, tiny_model

pytestmark = pytest.mark.cluster

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Orléans"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "weather"}}
WRITTEN = 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "é\\n", "x": [{}]}}\n</tool_call>\n'
WRITTEN += '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tools")
    flags = [*tiny_model(folder), "--tool-call-parser", "hermes"]
    with running(folder, prefill=1, decode=1, flags=flags) as cluster:
        yield cluster


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def asked(**fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "max_tokens": 300}
    return body | {"seed": 3} | fields


def whole(url: str, **fields: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    """(content, [(name, arguments)], finish reason)."""
    choice = client(url).chat.completions.create(**asked(**fields)).choices[0]
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return choice.message.content, [(c.function.name, c.function.arguments) for c in calls], choice.finish_reason


def streamed(url: str, **fields: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    """The same of a stream. At least one call comes in more than one piece."""
    content: str | None = None
    calls: list[tuple[str, str]] = []
    finish = ""
    for chunk in client(url).chat.completions.create(**asked(**fields), stream=True):
        (choice,) = chunk.choices
        finish = choice.finish_reason or finish
        content = content if not choice.delta.content else (content or "") + choice.delta.content
        for call in choice.delta.tool_calls or ():
            if call.id:
                calls.append((call.function.name, ""))
            name, so_far = calls[call.index]
            calls[call.index] = (name, so_far + call.function.arguments)
    return content, calls, finish


def test_calls_that_the_model_writes(cluster):
    fields = {"extra_body": {"guided_choice": [WRITTEN]}}
    wanted = ("Hm.", [("weather", '{"city": "é\\n", "x": [{}]}'), ("now", "{}")], "tool_calls")
    for url in (cluster.url, *(node.url for node in cluster.nodes)):
        assert whole(url, **fields) == wanted
        assert streamed(url, **fields) == wanted


def test_a_named_call_has_arguments_of_its_schema(cluster):
    told = whole(cluster.url, tool_choice=NAMED)
    content, ((name, arguments),), finish = told
    assert (content, name, finish) == (None, "weather", "stop")
    assert json.loads(arguments)["city"] in ("Paris", "Orléans")
    for url in (cluster.url, *(node.url for node in cluster.nodes)):
        assert streamed(url, tool_choice=NAMED) == told


def test_a_required_call_is_one_of_the_tools(cluster):
    # No comma, which would begin a second call.
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    told = whole(cluster.url, **fields)
    content, ((name, arguments),), finish = told
    assert (content, finish) == (None, "tool_calls")
    assert name in ("weather", "now")
    assert set(json.loads(arguments)) == ({"city", "days"} if name == "weather" else set())
    for url in (cluster.url, *(node.url for node in cluster.nodes)):
        assert streamed(url, **fields) == told


def test_results_of_tools_are_taken_and_none_calls_none(cluster):
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "now", "content": "noon"},
    ]
    fields = {"messages": messages, "tool_choice": "none", "extra_body": {"guided_choice": [WRITTEN]}}
    assert whole(cluster.url, **fields) == (WRITTEN, [], "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
          "tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_400(fields, param, cluster):
    with pytest.raises(BadRequestError) as refused:
        whole(cluster.url, **fields)
    assert refused.value.param == param
