"""Tokens in, tokens out on a real cluster: at the router through both legs, and at a node that is
asked directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster, Process, counted, further_router

pytestmark = pytest.mark.cluster

PATH = "/inference/v1/generate"
KEY = {"authorization": "Bearer ann"}
TOKEN_IDS = list(range(10, 60))
SAMPLING = {
    "max_tokens": 24,
    "temperature": 0.9,
    "seed": 3,
    "detokenize": False,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def router(small: Cluster) -> Iterator[Process]:
    with further_router(small, "--api-key", "ann") as ours:
        yield ours


@pytest.fixture(scope="module")
def decode(small: Cluster) -> Process:
    return small.of("decode")[0]


def post(url: str, path: str = PATH, **fields: Any) -> httpx2.Response:
    asked = {"model": "tiny", **fields}
    return httpx2.post(url + path, json=asked, headers=KEY, timeout=60)


def generated(url: str, sampling: dict[str, Any], **fields: Any) -> Any:
    answer = post(url, token_ids=TOKEN_IDS, sampling_params=sampling, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def completed(url: str, **fields: Any) -> Any:
    """The same by the completion route."""
    told = post(url, "/v1/completions", prompt=TOKEN_IDS, return_token_ids=True, **fields)
    assert told.status_code == 200, told.text
    return told.json()


def test_the_tokens_are_those_of_the_completion_on_both_legs_and_on_a_node(
    router: Process,
    decode: Process,
) -> None:
    own = {name: value for name, value in SAMPLING.items() if name != "detokenize"}
    expected = completed(router.url, **own, n=2, logprobs=2, return_tokens_as_token_ids=True)
    before = router.metric("kvrelay_router_disaggregated_total")
    answer = generated(router.url, SAMPLING | {"n": 2, "logprobs": 2}, request_id="mine")
    counted([router], "kvrelay_router_disaggregated_total", before + 1)
    assert answer["request_id"] == "mine"
    assert answer["usage"]["completion_tokens"] == 48
    for told, wanted in zip(answer["choices"], expected["choices"], strict=True):
        assert (told["token_ids"], told["finish_reason"]) == (wanted["token_ids"], "length")
        scored = told["logprobs"]["content"]
        assert [each["token"] for each in scored] == [
            f"token_id:{token}" for token in told["token_ids"]
        ]
        assert [each["logprob"] for each in scored] == wanted["logprobs"]["token_logprobs"]
        assert "text" not in told
    direct = generated(decode.url, SAMPLING)
    assert direct["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": [7] * 1024}, "token_ids"),
        ({"sampling_params": {"temperature": 3}}, "temperature"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(
    router: Process, decode: Process, fields: dict[str, Any], param: str
) -> None:
    for url in (router.url, decode.url):
        answer = post(url, **({"token_ids": [5], "sampling_params": {"max_tokens": 1}} | fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            404 if param == "model" else 400,
            param,
        )


def test_no_token_comes_without_a_key_or_with_a_place_to_fetch_from(router: Process) -> None:
    asked = {"model": "tiny", "token_ids": [5], "sampling_params": {"max_tokens": 1}}
    assert httpx2.post(router.url + PATH, json=asked, timeout=60).status_code == 401
    answer = post(router.url, **(asked | {"kv_transfer_params": {"do_remote_prefill": True}}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
