"""The table of formats: how each family reasons, and that the right row is chosen."""

# ruff: noqa: RUF001 - DeepSeek's markers are written with these characters

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvrelay.openai_api.message_stream import MessageForm, MessageStream
from kvrelay.openai_api.model_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    load_plugin,
    reasoning_format,
    tool_format,
)
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import Delta
from kvrelay.wire.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.sampling import Constraint
from tests.openai_api.answers import formed

NOW = {"type": "function", "function": {"name": "now"}}


def form(tokenizer: Tokenizer, tool: str, reasoning: str, prompt: str = "x") -> MessageForm:
    return formed(tokenizer, prompt, tool, reasoning, tools=[NOW])


def told(form: MessageForm, text: str) -> Delta:
    """What a client is told, the same in whatever pieces the text comes."""
    messages = []
    for width in (1, 2, 5, len(text)):
        stream = MessageStream(form)
        for at in range(0, len(text), width):
            stream.push(text[at : at + width])
        stream.finish()
        messages.append(stream.message())
    assert messages == messages[:1] * 4
    return msgspec.convert(messages[0], Delta, from_attributes=True)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "wanted"),
    [
        ("qwen3", "<think>\n", "a</think>b", ("a", "b")),
        ("deepseek_r1", "x", "<think>a", ("a", None)),
        ("mistral", "x", "[THINK]a[/THINK]b", ("a", "b")),
    ],
)
def test_how_models_of_a_family_reason(
    bytewise: Tokenizer,
    reasoning: str,
    prompt: str,
    text: str,
    wanted: tuple[str | None, str | None],
) -> None:
    found = told(form(bytewise, "hermes", reasoning, prompt), text)
    assert (found.reasoning, found.content) == wanted


# In the manner of the models' own templates.
TEMPLATES = {
    ("hermes", "qwen3"): '<tools>... <tool_call>\n{"name": ...}\n</tool_call> {{ "<think>" }}',
    ("qwen3_coder", None): "<tool_call>\n<function=example_name>\n<parameter=example_parameter_1>",
    ("hermes", "deepseek_r1"): "{{'<｜Assistant｜><think>\\n'}}",
    ("deepseek_v3", "qwen3"): "{{'<｜tool▁sep｜>' + name + '\\n' + '```json'}} </think>",
    ("mistral", "mistral"): "[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]",
    ("llama3_json", None): '{"name": function name, "parameters": dictionary of argument name and ',
}


@pytest.mark.parametrize(("rows", "template"), TEMPLATES.items())
def test_a_chat_template_tells_its_formats(rows: tuple[str, str | None], template: str) -> None:
    tool, reasoning = (
        tool_format("auto", template, "llama"),
        reasoning_format("auto", template, "llama"),
    )
    assert (tool and tool[0], reasoning and reasoning[0]) == rows


def test_the_models_type_tells_where_the_template_does_not_and_what_is_set_wins() -> None:
    found = [tool_format("auto", None, kind) for kind in ("mistral", "phi3", "")]
    assert [row and row[0] for row in found] == ["mistral", "hermes", "hermes"]
    assert reasoning_format("auto", "{{ messages }}", "llama") is None
    for template in TEMPLATES.values():
        assert (tool_format("json", template, "mistral") or ("",))[0] == "json"
    assert tool_format("none", "<tool_call>", "") is None
    assert reasoning_format("none", "<think>", "") is None


def test_the_flags_take_the_rows_that_there_are() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert tuple(REASONING_FORMATS) == REASONING_PARSERS


PLUGIN = """
from kvrelay.openai_api.model_formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat

TOOL_FORMATS["mine"] = ToolFormat(openers=("<call>",), closers=("</call>",))
REASONING_FORMATS["my_thoughts"] = ReasoningFormat(openers=("<hm>",), closers=("</hm>",))
"""


def test_a_plugin_adds_rows(
    tmp_path: Path, bytewise: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvrelay.openai_api.model_formats.TOOL_FORMATS", tools := dict(TOOL_FORMATS)
    )
    monkeypatch.setattr(
        "kvrelay.openai_api.model_formats.REASONING_FORMATS", thoughts := dict(REASONING_FORMATS)
    )
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser 'mine' is not one of .*--tool-parser-plugin FILE"
    ):
        tool_format("mine", None, "")
    (file := tmp_path / "mine.py").write_text(PLUGIN)
    load_plugin(str(file))
    assert tool_format("mine", None, "") == ("mine", tools["mine"])
    assert reasoning_format("my_thoughts", None, "") == ("my_thoughts", thoughts["my_thoughts"])
    monkeypatch.setitem(TOOL_FORMATS, "mine", tools["mine"])
    monkeypatch.setitem(REASONING_FORMATS, "my_thoughts", thoughts["my_thoughts"])
    found = told(form(bytewise, "mine", "my_thoughts"), '<hm>a</hm><call>{"name": "now"}</call>')
    assert found.tool_calls
    assert (found.reasoning, found.tool_calls[0].function.name) == ("a", "now")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (None, "No such"),
    ],
)
def test_a_plugin_that_fails_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"the plugin .*mine.py cannot be run: .*{said}"):
        load_plugin(str(file))
    with pytest.raises(ConfigError, match=r"must be a Python file, ending with \.py"):
        load_plugin(str(tmp_path / "mine"))


def test_a_constraint_is_about_what_follows_the_familys_own_markers(bytewise: Tokenizer) -> None:
    def guided(reasoning: str, prompt: str = "x") -> tuple[str, str]:
        found = form(bytewise, "hermes", reasoning, prompt).guided(Constraint("regex", "a"))
        assert found is not None
        return found.opener, found.behind

    assert guided("qwen3") == ("<think>", "</think>")
    assert guided("qwen3", "<think>") == ("", "</think>")
    assert guided("qwen3", "</think>") == ("", "")
    assert guided("deepseek_r1") == ("", "</think>")
