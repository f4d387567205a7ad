"""Tools for a model whose chat template does not render them: in a system text, and past calls as
text. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["PROBE", "told_tools"]

PROBE: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "kvrelay_probe",
            "description": "Shows whether a template renders tools.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
)
"""A template that renders tools shows this one's name."""

# docs/guides/answers.md repeats it.
_TEXT = """\
You can call these functions, each described by a JSON object with the schema of its arguments:
{tools}
To call a function, write nothing but the call, exactly in this form:
{example}
Give the arguments that the function asks for. Its result is then given to you between <tool_response> tags. If no \
function helps, answer without a call."""


def told_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    write: Callable[[str, Mapping[str, Any]], str],
    *,
    system: bool,
) -> list[dict[str, Any]]:
    """The messages with the tools in a system text, or before the first message's content where
    there can be none.

    `write` is how the model writes calls (ToolFormat.write). Calls become content, results a user's
    messages.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TEXT.format(tools=listed, example=write("name_of_the_function", {"argument": "value"}))
    told: list[dict[str, Any]] = []
    for message in messages:
        plain = {
            name: value
            for name, value in message.items()
            if name not in ("tool_calls", "tool_call_id")
        }
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if calls:
            written = [write(call["name"], _arguments(call)) for call in calls]
            plain["content"] = "\n".join(
                [*([plain["content"]] if plain["content"] else ()), *written]
            )
        if message["role"] == "tool":
            plain = {
                "role": "user",
                "content": f"<tool_response>\n{message['content']}\n</tool_response>",
            }
        if told and plain["role"] == told[-1]["role"] == "user":
            told[-1]["content"] += f"\n{plain['content']}"
        else:
            told.append(plain)
    if told[0]["role"] in ("system", "developer"):
        told[0]["content"] = f"{told[0]['content']}\n\n{text}"
    elif system:
        told.insert(0, {"role": "system", "content": text})
    else:
        told[0]["content"] = f"{text}\n\n{told[0]['content']}"
    return told


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    found = call.get("arguments")
    return found if isinstance(found, Mapping) else {}
