"""From a request to its prompt, and what an answer begins with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.openai_api.body import decode_chat, decode_completion
from kvrelay.openai_api.prompt import Prompts
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.wire.errors import RequestError

TEMPLATE = (
    "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{% for m in messages %}{{ "
    "m.content }};{% endfor %}"
)


def prompts(tokenizer: Tokenizer, *, trusts: bool = False) -> Prompts:
    return Prompts(tokenizer, 100, chat_template=TEMPLATE, trusts_request_templates=trusts)


def chat(*said: tuple[str, str], **fields: Any) -> Any:
    messages = [{"role": role, "content": content} for role, content in said]
    return decode_chat(json.dumps({"messages": messages, **fields}).encode())


def completion(**fields: Any) -> Any:
    return decode_completion(json.dumps(fields).encode())


def text(tokenizer: Tokenizer, request: Any, **options: Any) -> str:
    return tokenizer.decode(prompts(tokenizer, **options).token_ids(request))


def test_documents_reach_the_template(bytewise: Tokenizer) -> None:
    documents = [{"title": "a", "text": "..."}]
    assert text(bytewise, chat(("user", "x"), documents=documents)) == "[a]x;"


def test_a_template_of_a_request_is_taken_only_where_it_is_trusted(bytewise: Tokenizer) -> None:
    request = chat(("user", "x"), chat_template="<{{ messages[0].content }}>")
    assert text(bytewise, request, trusts=True) == "<x>"
    with pytest.raises(RequestError, match="--trust-request-chat-template") as refused:
        text(bytewise, request)
    assert refused.value.param == "chat_template"
    with pytest.raises(RequestError):
        text(bytewise, chat(("user", "x"), chat_template="{% broken"), trusts=True)


def test_only_the_last_tokens_of_a_prompt_are_kept(bytewise: Tokenizer) -> None:
    assert text(bytewise, completion(prompt="abcdef", truncate_prompt_tokens=2)) == "ef"
    assert prompts(bytewise).token_ids(completion(prompt=[1, 2, 3], truncate_prompt_tokens=2)) == [
        2,
        3,
    ]
    assert text(bytewise, chat(("user", "abcdef"), truncate_prompt_tokens=3)) == "ef;"


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "Some words, in 2 lines:\n\n  `a_b`: été. " * 8000,
        "1234567" * 40_000,
        "漢字 仮名" * 40_000,
        " <|im_end|>ab" * 20_000,
    ],
)
def test_of_a_text_that_is_cut_an_end_is_tokenized_and_its_tokens_are_those_of_the_whole(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    whole, seen, encode = smollm2.encode(text, True), list[int](), smollm2.encode
    monkeypatch.setattr(
        smollm2, "encode", lambda text, special: seen.append(len(text)) or encode(text, special)
    )
    made = Prompts(smollm2, 8192, chat_template=TEMPLATE, trusts_request_templates=False)
    for kept in (1, 2, 100, 1000):
        seen.clear()
        assert made.token_ids(completion(prompt=text, truncate_prompt_tokens=kept)) == whole[-kept:]
        assert sum(seen) <= 6 * kept + 4096


def test_where_tokens_are_long_more_of_a_text_is_tokenized(bytewise: Tokenizer) -> None:
    text, made = "<|end2|>" * 1000 + "ab", prompts(bytewise)
    whole = bytewise.encode(text, True)
    assert len(whole) == 1002
    long = Prompts(bytewise, 2000, chat_template=TEMPLATE, trusts_request_templates=False)
    for kept in (1, 50, 700, 1002, 1500):
        assert long.token_ids(completion(prompt=text, truncate_prompt_tokens=kept)) == whole[-kept:]
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be between 1 and 100"):
        made.token_ids(completion(prompt=text, truncate_prompt_tokens=101))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    bytewise: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytewise.longest_token_bytes == len("<|end2|>")
    assert (
        len(prompts(bytewise).token_ids(completion(prompt="x" * 800))) == 800
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
    assert many.token_ids(completion(prompt=words)) == encode(words, True)
    assert many.token_ids(completion(prompt="a b " * 500_000, truncate_prompt_tokens=2))


def test_tokens_of_a_text_that_does_not_fit_can_be_counted(bytewise: Tokenizer) -> None:
    limit = 1 << 20
    assert len(prompts(bytewise).token_ids(completion(prompt="x" * limit), fits=False)) == limit
    with pytest.raises(RequestError, match=f"{limit + 1} bytes; the limit here is {limit}"):
        prompts(bytewise).token_ids(completion(prompt="x" * (limit + 1)), fits=False)


def test_every_prompt_of_a_request_is_tokenized(bytewise: Tokenizer) -> None:
    assert prompts(bytewise).all_token_ids(completion(prompt=["a", [5, 6], "bc"])) == [
        [97],
        [5, 6],
        [98, 99],
    ]
    assert prompts(bytewise).all_token_ids(chat(("user", "x"))) == [[120, 59]]


def test_what_a_completion_repeats(bytewise: Tokenizer) -> None:
    def echo(**fields: Any) -> str:
        request, made = completion(**fields), prompts(bytewise)
        return made.beginning(request, made.token_ids(request)).echo

    assert echo(prompt="abc") == ""
    assert echo(prompt="abc", echo=True) == "abc"
    assert echo(prompt=[97, 98], echo=True) == "ab"
    assert echo(prompt="abc", echo=True, truncate_prompt_tokens=2) == "bc"


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({}, ("assistant", "")),
        ({"echo": True}, ("assistant", "so")),
        ({"add_generation_prompt": False, "echo": True}, ("assistant", "so")),
        ({"continue_final_message": True}, ("assistant", "")),
    ],
)
def test_what_a_chat_begins_with(
    bytewise: Tokenizer, fields: dict[str, Any], begins: tuple[str, str]
) -> None:
    beginning = prompts(bytewise).beginning(chat(("user", "x"), ("assistant", "so"), **fields), [1])
    assert (beginning.role, beginning.echo) == begins


def test_without_a_generation_prompt_the_answer_is_of_the_last_role(bytewise: Tokenizer) -> None:
    request = chat(("user", "x"), add_generation_prompt=False, echo=True)
    assert prompts(bytewise).beginning(request, [1]).role == "user"
    assert prompts(bytewise).beginning(request, [1]).echo == "x"
    other = chat(("user", "x"), echo=True)
    assert prompts(bytewise).beginning(other, [1]).echo == ""


def test_token_ids_of_the_prompt_are_given_back_to_who_asks(bytewise: Tokenizer) -> None:
    made = prompts(bytewise)
    assert made.beginning(completion(prompt="a"), [97]).prompt_token_ids is None
    assert made.beginning(completion(prompt="a", return_token_ids=True), [97]).prompt_token_ids == [
        97
    ]
