"""Constraints through a router and two nodes: the first token is the prefill node's, the rest the
decode node's.
"""

from __future__ import annotations

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
