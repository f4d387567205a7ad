"""Request bodies: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.openai_api.body import (
    REFUSED,
    decode_chat,
    decode_completion,
    prompt_only,
    prompts_of,
    sampling_params,
    token_limit,
)
from kvrelay.openai_api.types import ChatRequest, CompletionRequest
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import SamplingDefaults, SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
Request = ChatRequest | CompletionRequest


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def params(request: Request, prompt_tokens: int = 10, **defaults: Any) -> SamplingParams:
    limit = token_limit(request, prompt_tokens, 100, **defaults)
    return sampling_params(request, limit=limit, vocab_size=300, default_seed=7, **defaults)


def refusal(make: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as refused:
        make()
    return refused.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [{"role": "u"}], "prompt": ""} x',
        b"\xff",
        b"{'a':1}",
        b'{"n": 0, "x": tru',
    ],
)
def test_broken_json_is_refused(body: bytes) -> None:
    for decode in (decode_chat, decode_completion):
        why = refusal(lambda decode=decode: decode(body))  # type: ignore[misc]
        assert (why.status, why.code) == (400, "invalid_json")


@pytest.mark.parametrize("field", ["unknown", "messages", "logits_processors"])
def test_deep_nesting_is_refused_and_not_a_crash(field: str) -> None:
    body = f'{{"{field}": {"[" * 100_000}{"]" * 100_000}}}'.encode()
    refusal(lambda: decode_chat(body))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stop": [1]}, "stop[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: chat(**fields)).param == param


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"user": "ann"}, 0),
        ({"session_id": "s"}, 60),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, 300),
        ({"cache_control": {"type": "ephemeral"}, "session_id": "s"}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600),
        ({"prompt_cache_retention": "24h"}, 86400),
    ],
)
def test_the_longest_wish_counts(fields: dict[str, Any], seconds: int) -> None:
    assert chat(**fields).pin_s == seconds


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 129}, "n must be at most 128, got 129"),
        ({"top_p": 0}, "top_p must be above 0.0, got 0"),
        ({"seed": 2**63}, f"seed must be at most {2**63 - 1}, got"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1, got 0"),
        ({"stop": [""]}, "stop[0] must have at least 1 character, got \"\""),
        ({"stop": ["x"] * 65}, "stop must have at most 64 entries, got 65"),
        ({"stop": "x" * 1025}, "of length 1025"),
        ({"logit_bias": {"1": 101}}, "logit_bias must be at most 100.0"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids must have at most 1024 entries, got 1025"),
        ({"prompt_cache_key": "k" * 10_000_000}, "prompt_cache_key must have at most 256 char"),
        ({"prompt_cache_retention": "9999h"}, "prompt_cache_retention must be one of in_memory"),
        ({"tools": [{}] * 1025}, "tools must have at most 1024 entries, got 1025"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'messages[0].content[0].type must be text, got "image_url"',
        ),
    ],
)  # fmt: skip
def test_a_limit_is_named_with_the_value(fields: dict[str, Any], words: str) -> None:
    why = refusal(lambda: chat(**fields))
    assert words in why.message
    assert why.message.startswith(f"{why.param} must ")


@pytest.mark.parametrize("wanted", ["", "a b", "x" * 129, "é", "a\nb", 7])
def test_a_request_id_that_cannot_be_one_is_refused(wanted: Any) -> None:
    assert chat(request_id="my.id-1:2_3").request_id == "my.id-1:2_3"
    assert refusal(lambda: completion(request_id=wanted)).param == "request_id"


def test_a_missing_field_is_named() -> None:
    assert refusal(lambda: decode_chat(b"{}")).message == "messages is missing"
    assert "JSON object" in refusal(lambda: decode_chat(b"[1]")).message


@pytest.mark.parametrize(
    ("field", "other"),
    [("suffix", "x"), ("functions", [{"name": "f"}]), ("best_of", 2), ("guided_regex", "a")],
)
def test_what_is_not_built_is_refused_unless_it_asks_for_nothing(field: str, other: Any) -> None:
    for make in (chat, completion):
        for harmless in (None, *REFUSED[field][0]):
            assert make(**{field: harmless}).model == "m"
        why = refusal(lambda make=make: make(**{field: other}))  # type: ignore[misc]
        assert (why.param, why.code) == (field, "unsupported_parameter")
        assert f"{field} is not supported; " in why.message


def test_best_of_that_equals_n_asks_for_nothing() -> None:
    assert completion(best_of=3, n=3).n == 3


def test_null_is_the_default_everywhere_and_unknown_fields_are_ignored() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name not in ("messages", "model")]
    assert params(chat(**dict.fromkeys(names), store=True, metadata={"a": [1]})) == params(chat())


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a"], ["a"]),
        ([], [[]]),
        ("", [""]),
        (["a", [2, 3]], ["a", [2, 3]]),
    ],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, read: Any) -> None:
    assert prompts_of(completion(prompt=prompt)) == read


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [1, [2]], [1.5], {"a": 1}, None])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    assert (refusal(lambda: completion(prompt=prompt)).param or "").startswith("prompt")


def test_choices_of_all_prompts_have_a_limit() -> None:
    completion(prompt=["a"] * 64, n=2)
    why = refusal(lambda: completion(prompt=["a"] * 65, n=2))
    assert why.param == "prompt"
    assert "asks for 130 choices" in why.message


def test_defaults_are_the_apis() -> None:
    assert params(chat()) == SamplingParams(max_tokens=90, seed=7)
    assert params(completion()) == SamplingParams(max_tokens=16, seed=7)
    assert params(completion(), prompt_tokens=95).max_tokens == 5


OWN = SamplingDefaults(0.6, 0.9, 20, 0.05, 1.05, max_tokens=30, limit=40)


def test_what_is_left_out_is_the_models_own() -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert params(chat(), defaults=OWN) == SamplingParams(max_tokens=30, seed=7, **own)  # type: ignore[arg-type]
    assert params(completion(), defaults=OWN).max_tokens == 16
    given = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert params(chat(**given), defaults=OWN) == SamplingParams(max_tokens=30, seed=7)


def test_the_servers_limit_cuts_every_answer_and_the_models_default_none() -> None:
    assert params(chat(max_tokens=80), defaults=OWN).max_tokens == 40
    assert params(completion(), defaults=SamplingDefaults(limit=4)).max_tokens == 4
    assert params(chat(max_tokens=80), defaults=SamplingDefaults(max_tokens=30)).max_tokens == 80
    assert params(chat(), prompt_tokens=95, defaults=OWN).max_tokens == 5
    assert "max_tokens is 91" in refusal(lambda: params(chat(max_tokens=91), defaults=OWN)).message


def test_every_sampling_field_arrives() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "seed": -1, "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    more = {"stop_token_ids": [5, 6, 5], "logit_bias": {"3": -1.5}}
    got = params(chat(**fields, **more, max_tokens=9, max_completion_tokens=8))
    assert {name: getattr(got, name) for name in fields} == fields
    assert (got.max_tokens, got.stop_token_ids, got.logit_bias) == (8, (5, 6), ((3, -1.5),))


@pytest.mark.parametrize(
    ("field", "given", "meant"),
    [
        *(("top_k", -1, 0), ("top_k", 0, 0), ("top_k", 10**30, 300)),
        *(("temperature", 1e-9, 0.0), ("temperature", 0.01, 0.01)),
    ],
)
def test_all_tokens_and_greedy_are_asked_for_in_several_ways(
    field: str, given: float, meant: float
) -> None:
    assert getattr(params(chat(**{field: given})), field) == meant


@pytest.mark.parametrize(
    "fields",
    [
        *({"stop_token_ids": [300]}, {"logit_bias": {"300": 1}}, {"allowed_token_ids": [-1]}),
        *({"min_tokens": 91}, {"max_tokens": 0}),
    ],
)
def test_values_outside_of_the_models_limits_are_named(fields: dict[str, Any]) -> None:
    assert refusal(lambda: params(chat(**fields))).param == next(iter(fields))


@pytest.mark.parametrize(
    ("request_", "logprobs", "of_prompt"),
    [
        (chat(), None, None),
        (chat(logprobs=True, echo=True), 0, None),
        (chat(logprobs=True, top_logprobs=20), 20, None),
        (chat(logprobs=False, top_logprobs=0), None, None),
        (completion(logprobs=0), 0, None),
        (completion(echo=True, logprobs=1, stream=True), 1, 1),
        (completion(echo=True), None, None),
    ],
)
def test_logprobs_of_both_apis_and_of_an_echo(
    request_: Request, logprobs: int | None, of_prompt: int | None
) -> None:
    made = params(request_)
    assert (made.logprobs, made.prompt_logprobs) == (logprobs, of_prompt)


def test_the_context_limit_names_prompt_limit_and_remedy() -> None:
    assert params(completion(max_tokens=90)).max_tokens == 90
    why = refusal(lambda: params(completion(max_tokens=91)))
    assert (why.code, why.param) == ("context_length_exceeded", "max_tokens")
    for words in ("prompt has 10 tokens and max_tokens is 91", "is 100", "at most 90"):
        assert words in why.message
    why = refusal(lambda: params(chat(), prompt_tokens=100))
    assert (why.code, why.param) == ("context_length_exceeded", "messages")
    assert "no token" in refusal(lambda: params(chat(), prompt_tokens=0)).message


def test_a_prefill_leg_computes_one_token_and_checks_the_clients_own_limit() -> None:
    def leg(client_max_tokens: int, **fields: Any) -> ChatRequest:
        handover = {"do_remote_decode": True, "client_max_tokens": client_max_tokens}
        return chat(kv_transfer_params=handover, max_tokens=1, **fields)

    request = leg(50, min_tokens=5)
    assert (params(request).max_tokens, params(request).min_tokens) == (1, 1)
    assert token_limit(request, 10, 100) == 50
    assert token_limit(leg(0), 10, 100) == 90
    assert token_limit(leg(91, fit_max_tokens=True), 10, 100) == 90
    assert "max_tokens is 91" in refusal(lambda: params(leg(91))).message


def test_a_limit_that_shall_fit_is_lowered_to_the_room() -> None:
    for make in (chat, completion):
        for asked, given in ((91, 90), (5, 5), (None, 90)):
            assert token_limit(make(max_tokens=asked, fit_max_tokens=True), 10, 100) == given
    refusal(lambda: token_limit(chat(max_tokens=5, fit_max_tokens=True), 100, 100))


def test_no_token_at_all_is_an_answer_to_who_wants_the_prompt_back() -> None:
    only = completion(max_tokens=0, echo=True)
    assert prompt_only(only)
    assert (token_limit(only, 5, 100), params(only).max_tokens) == (0, 1)
    for request in (completion(max_tokens=0), chat(max_tokens=0, echo=True)):
        assert not prompt_only(request)
        refusal(lambda request=request: token_limit(request, 5, 100))  # type: ignore[misc]
