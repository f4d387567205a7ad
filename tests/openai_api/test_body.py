"""Request bodies: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvrelay.openai_api.body import (
    choice_count,
    decode_chat,
    decode_completion,
    prompt_only,
    prompts_of,
    sampling_params,
    token_limit,
    truncated_length,
)
from kvrelay.openai_api.types import ChatRequest, CompletionRequest
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import SamplingDefaults, SamplingParams
from kvrelay.wire.transfer import KvTransferParams

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def params(
    request: ChatRequest | CompletionRequest, prompt_tokens: int = 10, **limits: Any
) -> SamplingParams:
    wanted = {"max_model_len": 100, "vocab_size": 300, "default_seed": 7, **limits}
    return sampling_params(request, prompt_tokens=prompt_tokens, **wanted)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [], "prompt": ""} x',
        b"\xff",
        b'{"model": "\xff", "messages": []}',
        b"{'a':1}",
    ],
)
def test_broken_json_is_refused(body: bytes) -> None:
    for decode in (decode_chat, decode_completion):
        with pytest.raises(RequestError) as refused:
            decode(body)
        assert refused.value.status == 400
        assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    "field", ["unknown", "messages", "logits_processors", "chat_template_kwargs"]
)
def test_deep_nesting_is_refused_and_not_a_crash(field: str) -> None:
    body = f'{{"messages": [], "{field}": {"[" * 100_000}{"]" * 100_000}}}'.encode()
    with pytest.raises(RequestError):
        decode_chat(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": [{"role": ""}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"write": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.status == 400


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError, match="messages is missing") as refused:
        decode_chat(b"{}")
    assert refused.value.param == "messages"
    with pytest.raises(RequestError, match="JSON object"):
        decode_chat(b"[1]")


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (0, "n must be at least 1"),
        (-1, "at least 1"),
        (129, "129 choices, and the limit of one request is 128"),
    ],
)
def test_n_has_bounds(n: int, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        chat(n=n)
    assert refused.value.param == "n"
    assert chat(n=1).n == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("logits_processors", ["x"]),
        ("use_beam_search", True),
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(field: str, value: Any) -> None:
    for make in (chat, completion):
        with pytest.raises(RequestError, match=f"{field} is not supported yet") as refused:
            make(**{field: value})
        assert refused.value.param == field
        assert make(**{field: None}).model == "m"


def test_values_that_ask_for_nothing_and_unknown_fields_are_accepted() -> None:
    fields = {
        "best_of": 1,
        "echo": False,
        "suffix": "",
        "tools": [],
        "response_format": {"type": "text"},
    }
    assert (
        completion(
            **fields, tool_choice="none", use_beam_search=False, store=True, metadata={"a": [1]}
        ).prompt
        == "hi"
    )


def test_null_is_the_default_everywhere() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name not in ("messages", "model")]
    assert params(chat(**dict.fromkeys(names))) == params(chat())


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[1, 2]], [1, 2]), ([], []), ("", "")],
)
def test_one_prompt_in_any_of_its_forms(prompt: Any, read: Any) -> None:
    assert prompts_of(completion(prompt=prompt)) == [read]


def test_several_prompts_are_texts_or_token_ids() -> None:
    assert prompts_of(completion(prompt=["a", "b"])) == ["a", "b"]
    assert prompts_of(completion(prompt=[[1], [2, 3]])) == [[1], [2, 3]]
    assert prompts_of(completion(prompt=["a", [2, 3]])) == ["a", [2, 3]]
    completion(prompt=["a"] * 64, n=2)
    with pytest.raises(
        RequestError, match="65 prompts with 2 choices each are 130 choices"
    ) as refused:
        completion(prompt=["a"] * 65, n=2)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [1, [2]], [1.5], {"a": 1}, None])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        completion(prompt=prompt)
    assert (refused.value.param or "").startswith("prompt")


def test_defaults_are_the_apis() -> None:
    assert params(chat()) == SamplingParams(max_tokens=90, seed=7)
    assert params(completion()) == SamplingParams(max_tokens=16, seed=7)
    assert params(completion(), prompt_tokens=95).max_tokens == 5


OWN = SamplingDefaults(
    temperature=0.6,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.05,
    max_tokens=30,
    limit=40,
)


def test_what_is_left_out_is_the_models_own() -> None:
    own = {
        name: getattr(OWN, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    assert params(chat(), defaults=OWN) == SamplingParams(max_tokens=30, seed=7, **own)
    assert params(completion(), defaults=OWN) == SamplingParams(max_tokens=16, seed=7, **own)
    given = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert params(chat(**given), defaults=OWN) == SamplingParams(max_tokens=30, seed=7)
    assert params(chat(top_k=0), defaults=OWN).top_k == 0


def test_the_servers_limit_cuts_every_answer_and_the_models_default_none() -> None:
    assert params(chat(max_tokens=80), defaults=OWN).max_tokens == 40
    assert params(completion(max_tokens=35), defaults=OWN).max_tokens == 35
    assert params(chat(), defaults=SamplingDefaults(limit=40)).max_tokens == 40
    assert params(completion(), defaults=SamplingDefaults(limit=4)).max_tokens == 4
    assert params(chat(max_tokens=80), defaults=SamplingDefaults(max_tokens=30)).max_tokens == 80
    assert params(chat(), prompt_tokens=95, defaults=OWN).max_tokens == 5
    with pytest.raises(RequestError, match="max_tokens is 91"):
        params(chat(max_tokens=91), defaults=OWN)


def test_every_sampling_field_arrives() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "seed": -1, "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    got = params(
        chat(
            **fields,
            max_tokens=9,
            max_completion_tokens=8,
            stop_token_ids=[5, 6, 5],
            logit_bias={"3": -1.5},
        )
    )
    assert {name: getattr(got, name) for name in fields} == fields
    assert got.max_tokens == 8
    assert got.stop_token_ids == (5, 6)
    assert got.logit_bias == ((3, -1.5),)


@pytest.mark.parametrize(("top_k", "meant"), [(-1, 0), (0, 0), (7, 7), (10**30, 300)])
def test_top_k_of_all_tokens(top_k: int, meant: int) -> None:
    assert params(chat(top_k=top_k)).top_k == meant


@pytest.mark.parametrize(("temperature", "meant"), [(0, 0.0), (1e-9, 0.0), (0.01, 0.01)])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(
    temperature: float, meant: float
) -> None:
    assert params(chat(temperature=temperature)).temperature == meant


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"temperature": -1}, {"temperature": 2.01}, {"min_p": 2},
        {"presence_penalty": 3},
        {"seed": 2**63}, {"stop_token_ids": [300]}, {"logit_bias": {"300": 1}}, {"logit_bias": {"1": 101}},
        {"min_tokens": 91}, {"min_tokens": -1}, {"max_tokens": 0}, {"repetition_penalty": 0},
    ],
)  # fmt: skip
def test_values_outside_their_limits_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        params(chat(**fields))
    assert refused.value.param == next(iter(fields))


def test_logprobs_of_both_apis() -> None:
    assert params(chat()).logprobs is None
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=20)).logprobs == 20
    assert params(chat(logprobs=False, top_logprobs=0)).logprobs is None
    assert params(completion(logprobs=0)).logprobs == 0
    assert params(completion(logprobs=3)).logprobs == 3
    for wrong in (21, -1):
        with pytest.raises(RequestError) as refused:
            completion(logprobs=wrong)
        assert refused.value.param == "logprobs"


def test_the_context_limit_names_prompt_limit_and_remedy() -> None:
    with pytest.raises(
        RequestError, match=r"prompt has 10 tokens and max_tokens is 91.*is 100.*at most 90"
    ) as refused:
        params(completion(max_tokens=91))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    assert params(completion(max_tokens=90)).max_tokens == 90
    with pytest.raises(RequestError, match="prompt has 100 tokens") as refused:
        params(chat(), prompt_tokens=100)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(RequestError, match="no token"):
        params(chat(), prompt_tokens=0)


def test_a_prefill_leg_computes_one_token_and_checks_the_clients_own_limit() -> None:
    def leg(client_max_tokens: int, **fields: Any) -> ChatRequest:
        handover = {"do_remote_decode": True, "client_max_tokens": client_max_tokens}
        return chat(kv_transfer_params=handover, max_tokens=1, **fields)

    request = leg(50, min_tokens=5)
    assert isinstance(request.kv_transfer_params, KvTransferParams)
    assert (params(request).max_tokens, params(request).min_tokens) == (1, 1)
    assert token_limit(request, 10, 100) == 50
    assert token_limit(leg(0), 10, 100) == 90
    with pytest.raises(RequestError, match="max_tokens is 91"):
        params(leg(91))


def test_a_limit_that_shall_fit_is_lowered_to_the_room_on_both_legs() -> None:
    for make in (chat, completion):
        assert token_limit(make(max_tokens=91, fit_max_tokens=True), 10, 100) == 90
        assert token_limit(make(max_tokens=5, fit_max_tokens=True), 10, 100) == 5
        assert token_limit(make(fit_max_tokens=True), 10, 100) == 90
        handover = {"do_remote_decode": True, "client_max_tokens": 91}
        assert (
            token_limit(
                make(max_tokens=1, fit_max_tokens=True, kv_transfer_params=handover), 10, 100
            )
            == 90
        )
        with pytest.raises(RequestError, match="prompt has 100 tokens"):
            token_limit(make(max_tokens=5, fit_max_tokens=True), 100, 100)


def test_stop_is_a_string_or_a_list() -> None:
    assert chat(stop="x").stop_strings == ("x",)
    assert chat(stop=["x", "yz"]).stop_strings == ("x", "yz")
    assert chat(stop=[]).stop_strings == chat(stop="").stop_strings == chat().stop_strings == ()


def test_best_of_is_at_least_n_and_more_than_n_is_not_streamed() -> None:
    assert choice_count(completion(best_of=5, n=2)) == 5
    assert choice_count(completion(best_of=2, n=2, stream=True)) == 2
    assert params(completion(best_of=5, n=2)).logprobs == 0
    assert params(completion(best_of=2, n=2)).logprobs is None
    assert params(completion(best_of=5, logprobs=3)).logprobs == 3
    for fields in ({"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": 2, "stream": True}):
        with pytest.raises(RequestError) as refused:
            completion(**fields)
        assert refused.value.param == "best_of"
    with pytest.raises(RequestError, match="129 choices"):
        completion(best_of=129)


@pytest.mark.parametrize(
    ("wanted", "fields", "kept"),
    [(None, {}, 50), (10, {}, 10), (80, {}, 50), (-1, {}, 50), (-1, {"max_tokens": 60}, 40)],
)
def test_of_a_long_prompt_the_last_tokens_are_kept(
    wanted: int | None, fields: dict[str, Any], kept: int
) -> None:
    assert truncated_length(completion(truncate_prompt_tokens=wanted, **fields), 50, 100) == kept


def test_as_many_tokens_as_fit_is_what_the_answer_leaves() -> None:
    assert truncated_length(completion(truncate_prompt_tokens=-1), 500, 100) == 84
    assert truncated_length(chat(truncate_prompt_tokens=-1), 500, 100) == 99
    leg = KvTransferParams(do_remote_decode=True, client_max_tokens=30)
    assert (
        truncated_length(
            msgspec.structs.replace(completion(truncate_prompt_tokens=-1), kv_transfer_params=leg),
            500,
            100,
        )
        == 70
    )


@pytest.mark.parametrize("value", [0, -2, 101])
def test_an_impossible_truncation_is_refused(value: int) -> None:
    with pytest.raises(RequestError, match="between 1 and 100") as refused:
        truncated_length(completion(truncate_prompt_tokens=value), 50, 100)
    assert refused.value.param == "truncate_prompt_tokens"


def test_no_token_at_all_is_an_answer_to_who_wants_the_prompt_back() -> None:
    only = completion(max_tokens=0, echo=True)
    assert prompt_only(only)
    assert token_limit(only, 5, 100) == 0
    assert params(only).max_tokens == 1
    for request in (completion(max_tokens=0), chat(max_tokens=0, echo=True)):
        assert not prompt_only(request)
        with pytest.raises(RequestError, match="at least 1"):
            token_limit(request, 5, 100)


def test_a_message_is_gone_on_with_or_another_begun() -> None:
    assert chat(continue_final_message=True, add_generation_prompt=False).continue_final_message
    with pytest.raises(RequestError, match="exclude each other"):
        chat(continue_final_message=True, add_generation_prompt=True)


def test_a_priority_fits_in_32_bits() -> None:
    assert completion(priority=-5).priority == -5
    with pytest.raises(RequestError) as refused:
        completion(priority=2**40)
    assert refused.value.param == "priority"


def test_log_probabilities_of_the_prompt_are_asked_for_in_two_ways() -> None:
    def asked(request: ChatRequest | CompletionRequest) -> int | None:
        limits = {"prompt_tokens": 5, "max_model_len": 100, "vocab_size": 300}
        return sampling_params(request, default_seed=1, **limits).prompt_logprobs

    assert asked(completion(prompt_logprobs=3)) == asked(chat(prompt_logprobs=3)) == 3
    assert asked(completion(echo=True, logprobs=1, stream=True)) == 1
    assert asked(completion(echo=True, logprobs=1, prompt_logprobs=4)) == 4
    assert (
        asked(completion(echo=True))
        is asked(completion(logprobs=1))
        is asked(chat(echo=True, logprobs=True))
        is None
    )
    for fields in (
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": 0, "stream": True},
    ):
        for make in (chat, completion):
            with pytest.raises(RequestError) as refused:
                make(**fields)
            assert refused.value.param == "prompt_logprobs"
