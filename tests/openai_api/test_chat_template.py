"""Chat templates: what they are given, and what happens when they refuse."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.openai_api.body import decode_chat
from kvrelay.openai_api.prompt import check_template, render
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.wire.errors import ConfigError, RequestError

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<bot>{% endif %}"
)


def rendered(template: str | None, messages: list[dict[str, Any]], **options: Any) -> str:
    request = decode_chat(json.dumps({"messages": messages}).encode())
    every = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "add_generation_prompt": True}
    return render(template, request.messages, **(every | options))


def test_messages_are_rendered_with_and_without_the_generation_prompt() -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert rendered(CHATML, messages) == "<system>be kind<user>hi<bot>"
    assert rendered(CHATML, messages, add_generation_prompt=False) == "<system>be kind<user>hi"


def test_text_parts_are_joined_and_null_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
    ]
    assert rendered(CHATML, messages) == "<user>a\nb<assistant><assistant><bot>"


def test_tool_fields_reach_the_template_only_where_they_are_set() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "é<", "tool_call_id": "1", "name": "f"},
    ]
    given_back = [in_order(message) for message in given]
    given_back[0]["tool_calls"] = [{**call, "function": {"name": "f", "arguments": {}}}]
    assert rendered(template, given) == "".join(
        json.dumps(m, ensure_ascii=False) for m in given_back
    )


def in_order(message: dict[str, Any]) -> dict[str, Any]:
    return {
        n: message[n]
        for n in ("role", "content", "name", "tool_calls", "tool_call_id")
        if n in message
    }


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Orléans?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Orléans"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"sky": "blue"}'},
]
# In the manner of the models' own templates: where they look for tools, calls and results.
QWEN = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n' }}</tools><|im_end|>
{% endif %}{% for message in messages %}
{%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>assistant' }}{% if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{ tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MISTRAL = """{%- if tools is not none %}{{ "[AVAILABLE_TOOLS] [" }}{% for tool in tools %}
{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != "return" %}{{- '"' + key + '": ' }}
{%- if val is string %}{{- '"' + val + '"' }}{% else %}{{ val | tojson }}{% endif %}
{%- if not loop.last %}{{ ", " }}{% endif %}{% endfor %}{{ "}}" }}{% endfor %}{{ "][/AVAILABLE_TOOLS]" }}{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}{{ "[INST] " + message.content + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{ "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}{% set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if tool_call.id | length != 9 %}{{ raise_exception("ids of 9 characters") }}{% endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{% endfor %}{{ "]" + eos_token }}
{%- elif message.role == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- "[/TOOL_RESULTS]" }}
{%- endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (
            QWEN,
            '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": '
            '"Orléans"}}\n</tool_call>',
        ),
        (QWEN, '<|im_start|>user\n<tool_response>\n{"sky": "blue"}\n</tool_response><|im_end|>'),
        (QWEN, f"<tools>\n{json.dumps(WEATHER)}\n</tools>"),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Orléans"}, "id": '
            '"abcdefghi"}]</s>'
            '[TOOL_RESULTS] {"content": {"sky": "blue"}, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        ),
        (
            MISTRAL,
            '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "weather", '
            '"description": "Weather of',
        ),
    ],
)
def test_tools_calls_and_results_are_rendered_as_models_expect_them(
    template: str, wanted: str
) -> None:
    assert wanted in rendered(template, TOOL_CHAT, tools=[WEATHER])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"a": 1.50, "b": "\\u00e9"}', {"a": 1.5, "b": "é"}),
        ("", {}),
        (None, {}),
        ("{oops", "{oops"),
        ("[1]", "[1]"),
    ],
)
def test_arguments_become_objects_where_they_are_ones(arguments: Any, wanted: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert json.loads(rendered(template, [{"role": "assistant", "tool_calls": [call]}])) == wanted


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_past_reasoning_reaches_the_template_by_every_name_that_templates_know(name: str) -> None:
    template = "{% for m in messages %}[{{ m.reasoning }},{{ m.reasoning_content }}]{% endfor %}"
    said = [
        {"role": "assistant", "content": None, name: "hm"},
        {"role": "assistant", "content": "x", name: "so"},
    ]
    assert rendered(template, [*said, {"role": "user"}]) == "[hm,hm][so,so][,]"


def test_what_templates_expect_is_there() -> None:
    template = (
        "{{ bos_token }}{{ eos_token }}{{ kind }}{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y')|length }}{{ {'b': 'é<'} | tojson }}"
        "{{ tools is none }}{% generation %}{{ kind }}{% endgeneration %}"
    )
    assert rendered(template, [{"role": "user"}], kind="x") == '<s></s>x14{"b": "é<"}Truex'


@pytest.mark.parametrize(
    "template",
    [
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content + 'x' }}",
        "{{ 'a' + messages }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for x in %}",
    ],
)
def test_a_template_that_fails_is_a_client_error(template: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses these messages") as refused:
        rendered(template, [{"role": "user", "content": "hi"}])
    assert refused.value.param == "messages"
    assert ("alternate" in template) == ("roles must alternate" in refused.value.message)


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="messages must not be empty"):
        rendered(CHATML, [])


@pytest.mark.parametrize("template", [None, ""])
def test_without_a_template_the_remedy_is_named(template: str | None) -> None:
    with pytest.raises(RequestError, match="--chat-template FILE"):
        rendered(template, [{"role": "user", "content": "hi"}])


def test_the_end_of_the_last_message_is_found_in_linear_time() -> None:
    messages = [
        {"role": "user", "content": "a" * 400_000},
        {"role": "assistant", "content": "ab" + "a" * 200_000},
    ]
    began = time.process_time()
    with pytest.raises(RequestError, match="continue_final_message"):
        rendered("{{ messages[0].content }}", messages, continue_final_message=True)
    assert time.process_time() - began < 1


def test_a_broken_template_is_told_when_a_node_starts() -> None:
    check_template(CHATML)
    with pytest.raises(ConfigError, match="not valid Jinja"):
        check_template("{% for x in %}")


@pytest.mark.model
@pytest.mark.parametrize("generation", [True, False])
def test_smollm2_is_rendered_as_transformers_does(
    smollm2: Tokenizer, tmp_path: Path, generation: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    smollm2.backend.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        bos_token=smollm2.bos_token,
        eos_token=smollm2.eos_token,
    )
    for messages in (
        [{"role": "user", "content": "What is 2+2?"}],
        [
            {"role": "system", "content": "Be brief.\n"},
            {"role": "user", "content": " <|im_end|> é "},
        ],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ):
        wanted = theirs.apply_chat_template(
            messages,
            chat_template=smollm2.chat_template,
            tokenize=False,
            add_generation_prompt=generation,
        )
        got = rendered(smollm2.chat_template, messages, add_generation_prompt=generation)
        assert got == wanted


@pytest.mark.parametrize(
    ("template", "said", "prompt"),
    [
        (CHATML, "Once upon ", "<user>x<assistant>Once upon "),
        (
            "{% for m in messages %}[{{ m.content | trim }}]</s>{% endfor %}",
            " Once upon ",
            "[x]</s>[Once upon",
        ),
        (CHATML + "</end>", "x", "<user>x<assistant>x"),
    ],
)
def test_a_message_that_goes_on_ends_where_its_text_does(
    template: str, said: str, prompt: str
) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    assert (
        rendered(template, messages, add_generation_prompt=False, continue_final_message=True)
        == prompt
    )


@pytest.mark.parametrize(("template", "said"), [(CHATML, ""), ("nothing", "text")])
def test_a_message_without_text_does_not_go_on(template: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        rendered(template, [{"role": "assistant", "content": said}], continue_final_message=True)
    assert refused.value.param == "continue_final_message"
