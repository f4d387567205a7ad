"""Tool calls through a router and two nodes, with a model of random weights that is held to what it
writes.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from real_cluster import Cluster, Process, running, tiny_model

pytestmark = pytest.mark.cluster

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Orléans"]},
                "days": {"type": "integer", "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
LETTER = {
    "type": "function",
    "function": {
        "name": "letter",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "pattern": "^[a-z ]{400,500}$"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
WRITTEN = (
    'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "é\\n", "x": '
    "[{}]}}\n</tool_call>\n"
)
WRITTEN += '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tools")
    flags = tiny_model(folder, 2048)  # whose template knows no tools: all is chosen
    with running(folder, prefill=1, decode=2, flags=flags) as cluster:
        yield cluster


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def asked(**fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "?"}],
        "tools": TOOLS,
        "max_tokens": 300,
    }
    return body | {"seed": 3} | fields


def whole(url: str, **fields: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    """(content, [(name, arguments)], finish reason)."""
    choice = client(url).chat.completions.create(**asked(**fields)).choices[0]
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return (
        choice.message.content,
        [(c.function.name, c.function.arguments) for c in calls],
        choice.finish_reason,
    )


def streamed(
    url: str, *, begun: Callable[[], None] = lambda: None, **fields: Any
) -> tuple[str | None, list[tuple[str, str]], str]:
    """The same of a stream. `begun` is called once, when ten characters of a call's arguments are
    there.
    """
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
            if len(so_far) < 10 <= len(calls[call.index][1]):
                begun()
    return content, calls, finish


def test_calls_that_the_model_writes(cluster):
    fields = {"extra_body": {"structured_outputs": {"choice": [WRITTEN]}}}
    wanted = ("Hm.", [("weather", '{"city": "é\\n", "x": [{}]}'), ("now", "{}")], "tool_calls")
    for url in (cluster.url, *(node.url for node in cluster.nodes)):
        assert whole(url, **fields) == wanted
        assert streamed(url, **fields) == wanted


def test_a_decode_node_that_dies_in_the_middle_of_a_call_leaves_its_arguments_whole(cluster):
    """Both what parses the call and what constrains it go on where they stood, on another node."""
    asked = {"tools": [LETTER], "tool_choice": "required", "max_tokens": 700}
    asked["parallel_tool_calls"] = False

    def broken_legs() -> int:
        return cluster.router.log.read_text().count(": the decode request failed on ")

    undisturbed, before = whole(cluster.url, **asked), broken_legs()
    _, ((name, arguments),), finish = undisturbed
    assert (name, finish) == ("letter", "tool_calls")
    assert len(json.loads(arguments)["text"]) >= 400
    killed: list[Process] = []

    def kill() -> None:
        nodes = httpx2.get(f"{cluster.url}/health", timeout=5).json()["nodes"]
        (at_work,) = [node["url"] for node in nodes if node["role"] == "decode" and node["legs"]]
        killed.extend(node for node in cluster.of("decode") if node.url == at_work)
        killed[0].kill(signal.SIGKILL)

    try:
        assert streamed(cluster.url, begun=kill, **asked) == undisturbed
        assert broken_legs() == before + 1
    finally:
        for node in killed:
            cluster.wait_ready(cluster.restart(node))
