"""What vLLM nodes are asked, and what is read in their answers and in what they say of themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import parse_job

from kvrelay.router.nodes.node import HealthReport, NodeKind
from kvrelay.router.request.job import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    Job,
    begun,
    decode_body,
    is_undivided,
    prefill_body,
)
from kvrelay.router.transport.node_stream import parse_error
from kvrelay.router.transport.vllm import end_frame, error_in, handover_frame, report_of
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.outputs import Load
from kvrelay.wire.transfer import KvTransferParams
from tests.router.vllm_doubles import DONE, error, metrics_text

MODELS = (
    b'{"object":"list","data":[{"id":"m","parent":null,"max_model_len":64},'
    b'{"id":"alias"},{"id":"x","parent":"m"}]}'
)


def job(path: str = CHAT_PATH, **fields: Any) -> Job:
    return parse_job(json.dumps({"model": "m", **fields}).encode(), path, kind=NodeKind.VLLM)


def handover_of(body: bytes) -> KvTransferParams:
    params = handover_frame(body, stream=True).params
    assert params is not None
    return params


@given(
    st.dictionaries(
        st.text(),
        st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(-(2**63), 2**64 - 1)
        | st.text(),
    )
)
def test_a_hand_over_is_passed_on_byte_for_byte(extra: dict[str, Any]) -> None:
    given_away = json.dumps(
        {**extra, "do_remote_prefill": True, "remote_num_tokens": 1.0e3}, indent=1
    )
    body = (
        b'{"choices":[{}],"usage":{"prompt_tokens":7},"kv_transfer_params":'
        + given_away.encode()
        + b"}"
    )
    params = handover_of(body)
    assert handover_frame(body, stream=True).usage == (7, 0, 0)
    assert given_away.encode() in decode_body(job(messages=[]), params)


@pytest.mark.parametrize("params", [b"null", b"{}", b'{"do_remote_prefill":false}', b"[1]", b'"x"'])
def test_what_is_no_hand_over_is_not_passed_on(params: bytes) -> None:
    for body in (b'{"choices":[{}],"kv_transfer_params":' + params + b"}", b'{"choices":[{}]}'):
        assert b"kv_transfer_params" not in decode_body(job(messages=[]), handover_of(body))


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{}]', b"<html>"]
)
def test_what_is_no_answer_is_a_failure_of_the_node(body: bytes) -> None:
    for read in (handover_of, end_frame):
        with pytest.raises(NodeFailed):
            read(body)


def test_one_hand_over_is_for_one_sequence_without_log_probabilities_of_its_prompt() -> None:
    for path, fields in (
        (
            CHAT_PATH,
            {"messages": [], "n": 1, "logprobs": True, "echo": None, "prompt_logprobs": None},
        ),
        (COMPLETIONS_PATH, {"prompt": "a", "echo": True, "logprobs": None, "best_of": 1}),
        (
            COMPLETIONS_PATH,
            {"prompt": [1, 2], "echo": False, "logprobs": 3, "use_beam_search": False},
        ),
    ):
        assert not is_undivided(job(path, **fields))
    assert is_undivided(job(COMPLETIONS_PATH, prompt="a", best_of=2, n=1))
    assert is_undivided(job(COMPLETIONS_PATH, prompt_embeds="x"))


@given(st.integers(0, 4), st.booleans(), st.integers(400, 599))
def test_an_error_event_is_found_wherever_it_stands(
    before: int, wrapped: bool, status: int
) -> None:
    events = b'data: {"choices":[{"delta":{"content":"data: {\\"error\\""}}]}\n\n' * before
    assert error_in(events + DONE.encode())[1] is None
    told = b"data: " + json.dumps(error(status, "why", wrapped=wrapped)).encode() + b"\n\n"
    at, what, told_status = error_in(events + told + DONE.encode())
    assert what is not None
    assert (at, what.message, told_status) == (len(events), "why", status)


def test_an_error_without_a_shape_keeps_its_status() -> None:
    assert parse_error(b'{"detail":"Not Found"}', 404)[1] == 404
    assert parse_error(b"oops", 502)[1] == 502
    assert parse_error(b'{"error":{"message":"m","type":"t","code":"x"}}', 409)[0].code == "x"


def test_a_node_reports_its_models_and_the_load_of_all_its_engines() -> None:
    text = metrics_text(running=3, waiting=2).encode()
    report = report_of(Role.DECODE, MODELS, text)
    assert report == HealthReport(
        role=Role.DECODE,
        model="m",
        max_model_len=64,
        generation="1795234567.8",
        load=Load(3, 2),
        adapters=["alias", "x"],
        kind=NodeKind.VLLM,
    )
    on_prefill = report_of(Role.PREFILL, MODELS, text)
    assert isinstance(on_prefill, HealthReport)
    assert (on_prefill.load.running, on_prefill.load.waiting) == (0, 5)


@given(st.binary(max_size=200))
def test_metrics_of_any_kind_are_read_without_an_error(text: bytes) -> None:
    report = report_of(Role.PREFILL, MODELS, b"vllm:num_requests_running{} " + text + b"\n" + text)
    assert isinstance(report, HealthReport)


@pytest.mark.parametrize(
    "models", [b"", b"{}", b'{"data":[]}', b'{"data":[{"id":"x","parent":"m"}]}']
)
def test_a_node_without_a_model_takes_no_work(models: bytes) -> None:
    assert isinstance(report_of(Role.PREFILL, models, b""), str)


def test_the_clients_own_bytes_stay_as_they_are() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"\\u00e9 1.50"}],"temperature":1.50}'
    asked = parse_job(body, CHAT_PATH, kind=NodeKind.VLLM)
    for made in (prefill_body(asked, ()), decode_body(asked, begun(asked, prefill=False))):
        assert b'"\\u00e9 1.50"' in made
        assert b'"temperature":1.50' in made
