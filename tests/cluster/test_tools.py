"""Tool calls through a router and two nodes, with a model of random weights that is held to what it
writes.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from real_cluster import Cluster

pytestmark = pytest.mark.cluster

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
WRITTEN = (
    'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "é\\n", "x": '
    "[{}]}}\n</tool_call>\n"
)
WRITTEN += '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


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


def streamed(url: str, **fields: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    """The same of a stream."""
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


def test_calls_that_the_model_writes(small: Cluster) -> None:
    fields = {"extra_body": {"structured_outputs": {"choice": [WRITTEN]}}}
    wanted = ("Hm.", [("weather", '{"city": "é\\n", "x": [{}]}'), ("now", "{}")], "tool_calls")
    for url in (small.url, *(node.url for node in small.nodes)):
        assert whole(url, **fields) == wanted
        assert streamed(url, **fields) == wanted
