"""From a request to its prompt, and what an answer begins with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import UNSET

from kvrelay.openai_api.body import decode_chat, decode_completion
from kvrelay.openai_api.prompt import Prompts
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.wire.errors import RequestError

TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"


def prompts(tokenizer: Tokenizer, *, trusts: bool = False) -> Prompts:
    return Prompts(tokenizer, 100, chat_template=TEMPLATE, trusts_request_templates=trusts)


def chat(*said: tuple[str, str], **fields: Any) -> Any:
    messages = [{"role": role, "content": content} for role, content in said]
    return decode_chat(json.dumps({"messages": messages, **fields}).encode())


def completion(**fields: Any) -> Any:
    return decode_completion(json.dumps(fields).encode())


def text(tokenizer: Tokenizer, request: Any, **options: Any) -> str:
    return tokenizer.decode(prompts(tokenizer, **options).token_ids(request)[0])


def test_a_template_of_a_request_is_taken_only_where_it_is_trusted(bytewise: Tokenizer) -> None:
    request = chat(("user", "x"), chat_template="<{{ messages[0].content }}>")
    assert text(bytewise, request, trusts=True) == "<x>"
    with pytest.raises(RequestError, match="--trust-request-chat-template") as refused:
        text(bytewise, request)
    assert refused.value.param == "chat_template"
    with pytest.raises(RequestError):
        text(bytewise, chat(("user", "x"), chat_template="{% broken"), trusts=True)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    bytewise: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytewise.longest_token_bytes == len("<|end2|>")
    assert (
        len(prompts(bytewise).token_ids(completion(prompt="x" * 800))[0]) == 800
    )  # the limit on tokens is another's
    monkeypatch.setattr(bytewise, "encode", lambda *_: pytest.fail("it was tokenized"))
    for request, param in (
        (completion(prompt="é" * 401), "prompt"),
        (chat(("user", "x" * 800)), "messages"),
    ):
        with pytest.raises(
            RequestError, match="no token of this model stands for more than 8"
        ) as refused:
            prompts(bytewise).token_ids(request)
        assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


@pytest.mark.model
def test_a_text_of_too_many_tokens_is_tokenized_in_part(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    encode = smollm2.encode
    monkeypatch.setattr(
        smollm2, "encode", lambda text, special: seen.append(len(text)) or encode(text, special)
    )
    many = Prompts(smollm2, 40_000, chat_template=TEMPLATE, trusts_request_templates=False)
    with pytest.raises(RequestError, match="the context of this model is 40000 tokens") as refused:
        many.token_ids(completion(prompt="a b " * 500_000))
    assert refused.value.code == "context_length_exceeded"
    assert sum(seen) == 256 << 10
    seen.clear()
    words = (
        "internationalization " * 20_000
    )  # fits: it is tokenized once as a whole, whatever was counted before
    assert many.token_ids(completion(prompt=words)) == [encode(words, True)]


def test_tokens_of_a_text_that_does_not_fit_can_be_counted(bytewise: Tokenizer) -> None:
    limit = 1 << 20
    assert len(prompts(bytewise).token_ids(completion(prompt="x" * limit), fits=False)[0]) == limit
    with pytest.raises(RequestError, match=f"{limit + 1} bytes; the limit here is {limit}"):
        prompts(bytewise).token_ids(completion(prompt="x" * (limit + 1)), fits=False)


def test_every_prompt_of_a_request_is_tokenized(bytewise: Tokenizer) -> None:
    assert prompts(bytewise).token_ids(completion(prompt=["a", [5, 6], "bc"])) == [
        [97],
        [5, 6],
        [98, 99],
    ]
    assert prompts(bytewise).token_ids(chat(("user", "x"))) == [[120, 59]]


def test_what_a_completion_repeats(bytewise: Tokenizer) -> None:
    def echo(**fields: Any) -> str:
        request, made = completion(**fields), prompts(bytewise)
        return made.beginning(request, made.token_ids(request)[0]).echo

    assert echo(prompt="abc") == ""
    assert echo(prompt="abc", echo=True) == "abc"
    assert echo(prompt=[97, 98], echo=True) == "ab"


@pytest.mark.parametrize(
    ("fields", "role"),
    [({}, "assistant"), ({"add_generation_prompt": False}, "user")],
)
def test_the_role_that_a_chat_begins_with(
    bytewise: Tokenizer, fields: dict[str, Any], role: str
) -> None:
    assert prompts(bytewise).beginning(chat(("user", "x"), **fields), [1]).role == role


def test_token_ids_of_the_prompt_are_given_back_to_who_asks(bytewise: Tokenizer) -> None:
    made = prompts(bytewise)
    assert made.beginning(completion(prompt="a"), [97]).prompt_token_ids is UNSET
    assert made.beginning(completion(prompt="a", return_token_ids=True), [97]).prompt_token_ids == [
        97
    ]
