"""Chat templates: what they are given, and what happens when they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openai_api.body import decode_chat
from openai_api.chat_template import check_template, render
from openai_api.tokenizer import Tokenizer
from wire.errors import ConfigError, RequestError

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def rendered(template: str | None, messages: list[dict[str, Any]], **options: Any) -> str:
    request = decode_chat(json.dumps({"messages": messages}).encode())
    return render(template, request.messages, bos_token="<s>", eos_token="</s>", **options)


def test_messages_are_rendered_with_and_without_the_generation_prompt() -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert rendered(CHATML, messages) == "<system>be kind<user>hi<bot>"
    assert rendered(CHATML, messages, add_generation_prompt=False) == "<system>be kind<user>hi"


def test_text_parts_are_joined_and_null_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert rendered(CHATML, messages) == "<user>a\nb<assistant><assistant><bot>"


def test_tool_fields_reach_the_template_only_where_they_are_set() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "é<", "tool_call_id": "1", "name": "f"},
    ]
    assert rendered(template, given) == "".join(json.dumps(m, ensure_ascii=False) for m in map(in_order, given))


def in_order(message: dict[str, Any]) -> dict[str, Any]:
    return {n: message[n] for n in ("role", "content", "name", "tool_calls", "tool_call_id") if n in message}


def test_what_templates_expect_is_there() -> None:
    template = (
        "{{ bos_token }}{{ eos_token }}{{ kind }}{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}{{ strftime_now('%Y')|length }}{{ {'b': 'é<'} | tojson }}{{ tools is none }}"
    )
    assert rendered(template, [{"role": "user"}], kind="x") == '<s></s>x14{"b": "é<"}True'


@pytest.mark.parametrize(
    "template",
    [
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


def test_the_templates_own_message_is_told() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}", [{"role": "user"}])


@pytest.mark.parametrize("template", [None, ""])
def test_without_a_template_the_remedy_is_named(template: str | None) -> None:
    with pytest.raises(RequestError, match="--chat-template FILE"):
        rendered(template, [{"role": "user", "content": "hi"}])


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="messages must not be empty"):
        rendered(CHATML, [])


def test_a_broken_template_is_told_when_a_node_starts() -> None:
    check_template(CHATML)
    with pytest.raises(ConfigError, match="not valid Jinja"):
        check_template("{% for x in %}")


@pytest.mark.model
@pytest.mark.parametrize("generation", [True, False])
def test_smollm2_is_rendered_as_transformers_does(smollm2: Tokenizer, tmp_path: Path, generation: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    smollm2._backend.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token=smollm2.bos_token, eos_token=smollm2.eos_token
    )
    for messages in (
        [{"role": "user", "content": "What is 2+2?"}],
        [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " <|im_end|> é "}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ):
        wanted = theirs.apply_chat_template(
            messages, chat_template=smollm2.chat_template, tokenize=False, add_generation_prompt=generation
        )
        got = rendered(smollm2.chat_template, messages, add_generation_prompt=generation)
        assert got == wanted
