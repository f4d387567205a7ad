"""Constraints through a router and two nodes: the first token is the prefill node's, the rest the
decode node's.
"""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster

pytestmark = pytest.mark.cluster

END = 1


@pytest.fixture(scope="module")
def cluster(small: Cluster) -> Cluster:
    return small


def post(url: str, **fields: Any) -> httpx2.Response:
    body = {
        "model": "tiny",
        "prompt": "Say it:",
        "max_tokens": 150,
        "seed": 4,
        "logit_bias": {str(END): 20},
    }
    return httpx2.post(f"{url}/v1/completions", json=body | fields, timeout=60)


def answer(url: str, **fields: Any) -> tuple[str, str]:
    reply = post(url, **fields)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["text"], choice["finish_reason"]


def test_a_decode_node_that_takes_over_knows_the_tokens_alone(cluster):
    """As after the death of another one: it goes on from any of them, and notices that an answer is
    over already.
    """
    (decode,) = cluster.of("decode")
    fields = {"structured_outputs": {"choice": ["yes and no"]}, "prompt": [ord("?")]}
    taken_over = {"do_remote_prefill": True, "prompt_token_ids": [ord("?")], "seed": 4}
    for said in ("", "y", "yes and", "yes and no"):
        params = taken_over | {"generated": [*said.encode()]}
        assert answer(decode.url, **fields, kv_transfer_params=params) == ("yes and no", "stop")
    wrong = post(decode.url, **fields, kv_transfer_params=taken_over | {"generated": [*b"no"]})
    assert wrong.status_code == 400
    assert "does not match its grammar" in wrong.json()["error"]["message"]


def test_a_choice_that_is_over_with_its_first_token_keeps_the_others_going(cluster):
    fields = {
        "structured_outputs": {"regex": "x|[a-h]{9}"},
        "n": 6,
        "temperature": 1.0,
        "logit_bias": {str(ord("x")): 2},
    }
    replies = [
        post(url, **fields, seed=seed).json()
        for seed in range(6)
        for url in (cluster.url, cluster.nodes[1].url)
    ]
    texts = [[choice["text"] for choice in reply["choices"]] for reply in replies]
    assert texts[::2] == texts[1::2]
    assert {text[0] == "x" for text, *_ in texts} == {True, False}, (
        "the first choice ends on the prefill node, or not"
    )
    assert all(re.fullmatch("x|[a-h]{9}", text) for choices in texts for text in choices)
