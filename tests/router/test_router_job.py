"""What the router reads of a body, and the bodies of the two legs."""

from typing import Any

import msgspec
import pytest
from router_doubles import parse_job

from kvrelay.openai_api.types import MAX_CHOICES
from kvrelay.router.request.job import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    Job,
    decode_body,
    prefill_body,
)
from kvrelay.wire.errors import RequestError
from kvrelay.wire.transfer import KvTransferParams


def parse(path: str = CHAT_PATH, **fields: Any) -> Job:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT_PATH else {"prompt": "hi"}
    )
    return parse_job(msgspec.json.encode({"model": "m", **prompt, **fields}), path)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([7], 1), ([1, 22, 333], 3), (list(range(2_048)), 2_048), ("x" * 398, 100)],
)
def test_token_ids_are_counted_and_texts_are_estimated(prompt: object, tokens: int) -> None:
    for raw in (
        msgspec.json.encode,
        lambda body: msgspec.json.format(msgspec.json.encode(body), indent=1),
    ):
        assert parse_job(raw({"model": "m", "prompt": prompt}), COMPLETIONS_PATH).prompt_tokens in (
            tokens,
            tokens + 1,
        )


def test_min_tokens_are_held_against_a_completions_own_limit_only() -> None:
    assert parse(COMPLETIONS_PATH, min_tokens=99, fit_max_tokens=True).max_tokens == 0
    with pytest.raises(RequestError, match="min_tokens must be at most"):
        parse(COMPLETIONS_PATH, min_tokens=99)


def prefill(job: Job) -> dict[str, Any]:
    return msgspec.json.decode(prefill_body(job, ()))


def test_the_prefill_leg_asks_for_one_token_and_carries_the_clients_limit() -> None:
    body = prefill(parse(max_tokens=50, min_tokens=7, temperature=0.5, stream=True))
    assert (body["max_tokens"], body["min_tokens"], body["temperature"], body["stream"]) == (
        1,
        1,
        0.5,
        True,
    )
    assert "max_completion_tokens" not in body
    params = body["kv_transfer_params"]
    assert params == {
        "do_remote_decode": True,
        "client_max_tokens": 50,
        "pipelined": True,
        "created": 99,
        "seed": 1234,
        "pin": {},
    }
    assert msgspec.convert(params, KvTransferParams).do_remote_decode


def test_the_priority_goes_along_and_is_known() -> None:
    assert (parse(priority=-3).priority, parse().priority) == (-3, 0)
    assert prefill(parse(priority=-3))["priority"] == -3


def test_max_completion_tokens_of_a_chat_wins_and_is_replaced_too() -> None:
    body = prefill(parse(max_tokens=50, max_completion_tokens=9))
    assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1)
    assert body["kv_transfer_params"]["client_max_tokens"] == 9


def test_the_decode_leg_has_the_clients_own_limits_and_no_prompt_text() -> None:
    params = KvTransferParams(do_remote_prefill=True, prompt_token_ids=[1], generated=[2])
    body = msgspec.json.decode(decode_body(parse(max_tokens=50, min_tokens=7), params))
    assert (body["max_tokens"], body["min_tokens"], body["messages"]) == (50, 7, [])
    assert msgspec.convert(body["kv_transfer_params"], KvTransferParams) == params
    assert msgspec.json.decode(decode_body(parse(COMPLETIONS_PATH), params))["prompt"] == ""


def test_the_decode_leg_keeps_the_prompt_without_token_ids_or_where_the_answer_needs_its_words() -> (
    None
):
    known = KvTransferParams(do_remote_prefill=True, prompt_token_ids=[1], generated=[2])
    for params, fields in (
        (KvTransferParams(do_remote_prefill=True), {}),
        (known, {"echo": True}),
        (known, {"add_generation_prompt": False}),
        (known, {"continue_final_message": True}),
    ):
        body = msgspec.json.decode(decode_body(parse(**fields), params))
        assert body["messages"] == [{"role": "user", "content": "hi"}]


def test_who_wants_the_prompt_back_and_no_token_is_asked_for_none() -> None:
    body = prefill(parse(COMPLETIONS_PATH, max_tokens=0, echo=True))
    assert body["max_tokens"] == 0
    assert "client_max_tokens" not in body["kv_transfer_params"]
    with pytest.raises(RequestError):
        parse(COMPLETIONS_PATH, max_tokens=0)
    with pytest.raises(RequestError):
        parse(CHAT_PATH, max_tokens=0, echo=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": "x"}, "seed"),
        ({"stream": 1}, "stream"),
        ({"include_metrics": "yes"}, "include_metrics"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"remote_host": "10.0.0.1"}, "remote_host"),
        ({"do_remote_prefill": True}, "do_remote_prefill"),
        ({"remote_anything": 1}, "remote_anything"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b'{"model":"\xff"}',
        b'{"model":"m","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":"' + b"x" * 300 + b'","messages":[]}',
        b'{"model":"m","kv_transfer_params":null,"kv_transfer_params":{"remote_host":"h"}}',
        b'{"model":"m","kv\\u005ftransfer_params":{"do_remote_prefill":true}}',
        b'{"model":"m","vllm_xargs":{"kv\\u005ftransfer_params":{}}}',
    ],
)
def test_what_is_no_json_object_or_hides_a_hand_over_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_job(body, CHAT_PATH)
    for harmless in ({"kv": {"kv_transfer_params": 1}}, None):
        parse(vllm_xargs=harmless)


@pytest.mark.parametrize("number", [str(2**63), "9" * 30])
def test_numbers_beyond_64_bits_are_refused_where_the_router_reads_them(number: str) -> None:
    for name in ("seed", "max_tokens"):
        with pytest.raises(RequestError) as refused:
            parse_job(f'{{"model":"m","{name}":{number}}}'.encode(), CHAT_PATH)
        assert refused.value.param == name


def test_fields_that_the_router_does_not_know_keep_their_bytes() -> None:
    body = b'{"model":"m","messages":[],"big":123456789012345678901234567890,"text":"\\u00e9"}'
    out = prefill_body(parse_job(body, CHAT_PATH), ())
    assert b'"big":123456789012345678901234567890' in out
    assert b'"text":"\\u00e9"' in out


def test_the_session_is_the_headers_or_the_cache_key_or_the_user() -> None:
    body = msgspec.json.encode({"model": "m", "messages": [], "user": "ann"})
    assert parse_job(body, CHAT_PATH, session="s1").session_id == "s1"
    assert parse(user="ann", prompt_cache_key="talk 7").session_id == "talk 7"
    assert parse(prompt_cache_key="talk 7", session_id="s2").session_id == "s2"
    assert (parse(user="ann").session_id, parse().session_id) == ("ann", "")


@pytest.mark.parametrize(
    "fields", [{"n": 9 * 10**18}, {"best_of": 9 * 10**18}, {"n": MAX_CHOICES + 1}]
)
def test_more_choices_than_a_request_may_have_are_refused_before_anything_reckons_with_them(
    fields: Any,
) -> None:
    for path in (CHAT_PATH, COMPLETIONS_PATH):
        with pytest.raises(RequestError, match="choices, n for each prompt; the limit is"):
            parse(path, **fields)
    assert parse(COMPLETIONS_PATH, n=MAX_CHOICES, best_of=MAX_CHOICES).choices == MAX_CHOICES
