"""The table of formats: what each family writes is read back however it is cut, and the right row
is chosen.
"""
# ruff: noqa: RUF001 - DeepSeek's markers are written with these characters

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.body import decode_chat
from kvrelay.openai_api.message_stream import message_form
from kvrelay.openai_api.model_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    load_plugin,
    reasoning_format,
    tool_format,
)
from kvrelay.openai_api.reasoning import Opening
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import ReplyMessage
from kvrelay.wire.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.sampling import Constraint

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "tags": {"type": "array"},
            },
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def message(
    tokenizer: Tokenizer,
    tool: str,
    reasoning: str,
    pieces: list[str],
    prompt: str = "x",
    **fields: Any,
) -> ReplyMessage:
    """What a client is told of an answer that comes in these pieces."""
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [WEATHER, NOW], **fields}
    form = message_form(
        decode_chat(json.dumps(body).encode()),
        tokenizer,
        tokenizer.encode(prompt, False),
        tool_format=TOOL_FORMATS.get(tool),
        reasoning=REASONING_FORMATS.get(reasoning),
    )
    parser = form.parser("chatcmpl-1", 0)
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    return parser.message()


def told(
    tokenizer: Tokenizer, tool: str, reasoning: str, text: str, **fields: Any
) -> tuple[Any, Any, list[Any]]:
    """(reasoning, content, [(name, arguments)]), the same in whatever pieces the text comes."""
    whole = message(tokenizer, tool, reasoning, [text], **fields)
    for width in (1, 2, 5):
        pieces = [text[at : at + width] for at in range(0, len(text), width)]
        assert message(tokenizer, tool, reasoning, pieces, **fields) == whole
    calls = whole.tool_calls if isinstance(whole.tool_calls, list) else []
    return (
        whole.reasoning,
        whole.content,
        [(call.function.name, json.loads(call.function.arguments)) for call in calls],
    )


PARIS = ("get_weather", {"city": "Paris", "days": 3})
HARMONY_CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("tool", "text", "content", "calls"),
    [
        (
            "qwen3_coder",
            "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "Let me look.",
            [PARIS, ("now", {})],
        ),
        # Values of several lines, with quotes; JSON where the schema wants it, null and Python's
        # words.
        (
            "qwen3_coder",
            '<tool_call>\n<function=get_weather>\n<parameter=city>\na "b"\n\n<c> '
            "\n</parameter>\n<parameter=units>"
            "\nnull\n</parameter>\n<parameter=tags>\n['x', "
            "True]\n</parameter>\n</function>\n</tool_call>",
            None,
            [("get_weather", {"city": 'a "b"\n\n<c> ', "units": None, "tags": ["x", True]})],
        ),
        # Without the outer tag, which the model forgets at times
        ("qwen3_xml", "<function=now>\n</function>", None, [("now", {})]),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>",
            None,
            [PARIS],
        ),
        (
            "glm47",
            "<tool_call>now</tool_call><tool_call>now\n</tool_call>!",
            "!",
            [("now", {}), ("now", {})],
        ),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris", "days": '
            "3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
            "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            None,
            [PARIS, ("now", {})],
        ),
        (
            "deepseek_v31",
            'Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", '
            '"days": 3}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Well.",
            [PARIS, ("now", {})],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            None,
            [PARIS, ("now", {})],
        ),
        (
            "granite",
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
            None,
            [PARIS],
        ),
        ("pythonic", "[get_weather(city='Paris', days=3), now()]", None, [PARIS, ("now", {})]),
        (
            "pythonic",
            "<|python_start|>[get_weather(city='it\\'s)', units=null, tags=[{'a': -1.5}, "
            "True])]<|python_end|>",
            None,
            [("get_weather", {"city": "it's)", "units": None, "tags": [{"a": -1.5}, True]})],
        ),
        (
            "llama3_json",
            '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
            None,
            [PARIS],
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            None,
            [("now", {})],
        ),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}', None, [PARIS]),
        # What is no call stays content.
        ("pythonic", "[1] says: f(x)", "[1] says: f(x)", []),
        ("pythonic", "[get_weather('Paris')]", "[get_weather('Paris')]", []),
        ("qwen3_coder", "if a <function>", "if a <function>", []),
        ("glm45", "<tool_call>I think so</tool_call>", "<tool_call>I think so</tool_call>", []),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>hm", "<｜tool▁calls▁begin｜>hm", []),
    ],
)
def test_what_models_of_a_family_write(
    bytewise: Tokenizer, tool: str, text: str, content: str | None, calls: list[Any]
) -> None:
    assert told(bytewise, tool, "", text) == (None, content, calls)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "wanted"),
    [
        ("qwen3", "x", "<think>\na\n</think>\n\nb", ("a", "b")),
        ("qwen3", "x", "b", (None, "b")),
        ("qwen3", "<think>\n", "a</think>b", ("a", "b")),
        ("qwen3", "<think>\n\n</think>\n\n", "b", (None, "b")),
        ("deepseek_v3", "</think>", "b", (None, "b")),
        ("deepseek_r1", "x", "a</think>b", ("a", "b")),
        ("deepseek_r1", "x", "<think>a", ("a", None)),
        ("glm45", "x", "\n<think>a</think>\nb", ("a", "b")),
        ("kimi_k2", "x", "◁ a</think>b", ("◁ a", "b")),
        (
            "granite",
            "x",
            "Here is my thought process: a: b\n\nHere is my response: c",
            ("a: b", "c"),
        ),
        ("granite", "x", "Here's my thought process: a Here's my response:c", ("a", "c")),
        ("granite", "x", "Here is my answer", (None, "Here is my answer")),
        ("mistral", "x", "[THINK]a[/THINK]b", ("a", "b")),
        ("seed_oss", "x", "<seed:think>a</seed:think>b", ("a", "b")),
        (
            "openai_gptoss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
            ("a", "b"),
        ),
        (
            "openai_gptoss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>c",
            ("a\nc", None),
        ),
        ("openai_gptoss", "<|start|>assistant", '{"a": 1}', (None, '{"a": 1}')),
    ],
)
def test_how_models_of_a_family_reason(
    bytewise: Tokenizer,
    reasoning: str,
    prompt: str,
    text: str,
    wanted: tuple[str | None, str | None],
) -> None:
    assert told(bytewise, "hermes", reasoning, text, prompt=prompt)[:2] == wanted


@pytest.mark.parametrize(
    ("tool", "reasoning", "text", "wanted"),
    [
        (
            "openai",
            "openai_gptoss",
            f'<|channel|>analysis<|message|>a<|end|><|start|>assistant{HARMONY_CALL}{{"city": '
            f'"Paris", "days": 3}}'
            "<|call|>",
            ("a", None, [PARIS]),
        ),
        # The recipient may stand before the channel, words to the user before a call, and a call at
        # the very beginning.
        (
            "openai",
            "openai_gptoss",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant "
            "to=functions.now<|channel|>commentary "
            "json<|message|>{}",
            (None, "I look.", [("now", {})]),
        ),
        (
            "openai",
            "openai_gptoss",
            " to=functions.now<|channel|>commentary<|message|>{}",
            (None, None, [("now", {})]),
        ),
        # Without its reasoning parser
        ("openai", "", f"{HARMONY_CALL}{{}}<|call|>", (None, None, [("get_weather", {})])),
        # A section of calls ends Kimi's thoughts.
        (
            "kimi_k2",
            "kimi_k2",
            "hm<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            ("hm", None, [("now", {})]),
        ),
        (
            "glm45",
            "glm45",
            "\n<think>a <tool_call>no</think>\n<tool_call>now\n</tool_call>",
            ("a <tool_call>no", None, [("now", {})]),
        ),
    ],
)
def test_reasoning_and_calls_of_one_answer(
    bytewise: Tokenizer, tool: str, reasoning: str, text: str, wanted: Any
) -> None:
    assert told(bytewise, tool, reasoning, text) == wanted


_TEXTS = st.text("ab é\n\"'\\{}:", max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | _TEXTS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text("ab é", max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=300)
@given(
    name=st.sampled_from(list(TOOL_FORMATS)),
    calls=st.lists(
        st.dictionaries(st.from_regex("[a-z]{1,4}_", fullmatch=True), _VALUES, max_size=3),
        min_size=1,
        max_size=2,
    ),
    said=st.booleans(),
)
def test_every_family_reads_what_it_writes(
    name: str, calls: list[dict[str, Any]], said: bool, bytewise: Tokenizer
) -> None:
    row = TOOL_FORMATS[name]
    # The name says the type: one argument cannot be a text in one call and something else in
    # another.
    calls = [{key + type(value).__name__: value for key, value in call.items()} for call in calls]
    kinds = {
        key: {"type": "string"} if isinstance(call[key], str) else {}
        for call in calls
        for key in call
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": kinds}},
    }
    before = "Well.\n" if said and not row.marks.bare else ""
    text = before + "\n".join(row.write("f", call) for call in calls)
    found = told(
        bytewise,
        name,
        "openai_gptoss" if name == "openai" and not before else "",
        text,
        tools=[tool],
    )
    assert found[2] == [("f", call) for call in calls]
    assert (found[1] or "").strip() == before.strip()


def test_a_cut_off_call_keeps_what_was_told(bytewise: Tokenizer) -> None:
    for row, text in (
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar\n</par"),
        ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par</arg"),
    ):
        found = message(bytewise, row, "", list(text))
        assert isinstance(found.tool_calls, list)
        assert (found.content, found.tool_calls[0].function.arguments) == (None, '{"city": "Par')


def test_long_texts_are_told_as_they_come(bytewise: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [WEATHER]}
    form = message_form(
        decode_chat(json.dumps(body).encode()),
        bytewise,
        [1],
        tool_format=TOOL_FORMATS["qwen3_coder"],
        reasoning=None,
    )
    parser = form.parser("x", 0)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nPa")
    (delta,) = parser.push('r"\nx')
    assert delta.tool_calls is not None
    assert delta.tool_calls[0].function.arguments == 'r\\"\\nx'


def test_ids_are_those_that_the_model_counts(bytewise: Tokenizer) -> None:
    call = {
        "id": "functions.now:0",
        "type": "function",
        "function": {"name": "now", "arguments": "{}"},
    }
    past = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": call["id"]},
    ]
    messages = [{"role": "user", "content": "?"}, *past]
    found = message(
        bytewise, "kimi_k2", "", [TOOL_FORMATS["kimi_k2"].write("now", {})], messages=messages
    )
    assert isinstance(found.tool_calls, list)
    assert found.tool_calls[0].id == "functions.now:1"


# In the manner of the models' own templates.
TEMPLATES = {
    (
        "hermes",
        "qwen3",
    ): '<tools>... return <tool_call>\n{"name": ...}\n</tool_call> {{ "<think>" }}',
    (
        "qwen3_coder",
        None,
    ): "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    (
        "glm45",
        "glm45",
    ): "[gMASK]<sop> <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think></think>",
    (
        "deepseek_v3",
        "deepseek_r1",
    ): "'<｜tool▁sep｜>' + name + '\\n```json' {{'<｜Assistant｜><think>\\n'}}",
    ("deepseek_v31", "deepseek_v3"): "name + '<｜tool▁sep｜>' {{'<｜Assistant｜>'}}{{'</think>'}}",
    (
        "kimi_k2",
        "kimi_k2",
    ): "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|> <think></think>",
    ("kimi_k2", None): "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    ("openai", "openai_gptoss"): "<|start|>assistant<|channel|>analysis<|message|>",
    ("mistral", "mistral"): "[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]",
    ("granite", "granite"): "<|tool_call|> 'Here is my thought process:' 'Here is my response:'",
    (
        "llama3_json",
        None,
    ): 'Environment: ipython, {"name": function name, "parameters": dictionary of argument name '
    "and ",
    ("pythonic", None): "[func_name1(params_name1=params_value1...), func_name2(params)]",
}


@pytest.mark.parametrize(("rows", "template"), TEMPLATES.items())
def test_a_chat_template_tells_its_formats(rows: tuple[str, str | None], template: str) -> None:
    tool, reasoning = (
        tool_format("auto", template, "llama"),
        reasoning_format("auto", template, "llama"),
    )
    assert (tool and tool[0], reasoning and reasoning[0]) == rows


def test_the_models_type_tells_where_the_template_does_not_and_what_is_set_wins() -> None:
    found = [
        tool_format("auto", None, kind)
        for kind in ("gpt_oss", "glm4_moe", "deepseek_v3", "mistral", "phi3", "")
    ]
    assert [row and row[0] for row in found] == [
        "openai",
        "glm45",
        "deepseek_v31",
        "mistral",
        "hermes",
        "hermes",
    ]
    assert reasoning_format("auto", "{{ messages }}", "llama") is None
    assert (reasoning_format("auto", None, "gpt_oss") or ("",))[0] == "openai_gptoss"
    for template in TEMPLATES.values():
        assert (tool_format("json", template, "gpt_oss") or ("",))[0] == "json"
    assert tool_format("none", "<tool_call>", "") is None
    assert reasoning_format("none", "<think>", "") is None


def test_the_flags_take_the_rows_that_there_are() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert tuple(REASONING_FORMATS) == REASONING_PARSERS


PLUGIN = """
from kvrelay.openai_api.model_formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from kvrelay.openai_api.reasoning import ReasoningMarks
from kvrelay.openai_api.tool_parsers import CallMarks

TOOL_FORMATS["mine"] = ToolFormat(
    write=lambda name, arguments: f"!{name}!", marks=CallMarks(("<call>",), ("</call>",))
)
REASONING_FORMATS["my_thoughts"] = ReasoningFormat(marks=ReasoningMarks(("<hm>",), ("</hm>",)))
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
    text = '<hm>a</hm><call>{"name": "now"}</call>'
    assert told(bytewise, "mine", "my_thoughts", text) == ("a", None, [("now", {})])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import not_there_", "ModuleNotFoundError"),
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
        form = message_form(
            decode_chat(b'{"messages": [{"role": "user", "content": "?"}]}'),
            bytewise,
            bytewise.encode(prompt, False),
            tool_format=None,
            reasoning=REASONING_FORMATS[reasoning],
        )
        found = form.guided(Constraint("regex", "a"))
        assert found is not None
        return found.opener, found.behind

    assert guided("qwen3") == ("<think>", "</think>")
    assert guided("qwen3", "<think>") == ("", "</think>")
    assert guided("qwen3", "</think>") == ("", "")
    assert guided("deepseek_r1") == ("", "</think>")
    assert guided("granite") == ("Here is my thought process:", "Here is my response:")
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert guided("openai_gptoss") == ("<|channel|>analysis<|message|>", final)
    assert REASONING_FORMATS["qwen3"].marks.opening("x") is Opening.FREE
