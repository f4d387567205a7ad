"""Every sampling feature, disaggregated and alone: the same answers, token for token, one at a time
and four at once; also of a router whose prefill nodes are gone.

The prefill node that answers alone does not speculate and the decode node does, so that is compared
as well.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from real_cluster import (
    SMALL_LEASE_S,
    SMALL_LONGEST_BODY,
    Cluster,
    Process,
    complete,
    counted,
    free_port,
    further_router,
    ids,
    ticket_of,
    tiny_body,
)

pytestmark = pytest.mark.cluster

MAX_TOKENS = 14
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 11}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": SAMPLED,
    "top_p": SAMPLED | {"top_p": 0.7},
    "top_k": SAMPLED | {"top_k": 9},
    "min_p": SAMPLED | {"min_p": 0.9},
    "presence_penalty": SAMPLED | {"presence_penalty": 1.5},
    "frequency_penalty": SAMPLED | {"frequency_penalty": -1.5},
    "repetition_penalty": SAMPLED | {"repetition_penalty": 1.7},
    "logit_bias": SAMPLED | {"logit_bias": {"77": 3, "78": -100}},
    "min_tokens": SAMPLED | {"ignore_eos": False, "min_tokens": 5, "logit_bias": {"1": 6}},
    "stop_token_ids": SAMPLED | {"stop_token_ids": list(range(100, 140))},
    "included stop": SAMPLED | {"stop": ["t1", "t2", "a"], "include_stop_str_in_output": True},
    "token ids": SAMPLED | {"logprobs": 1, "return_token_ids": True},
    "echo": SAMPLED | {"echo": True, "logprobs": 1},
    "allowed_token_ids": SAMPLED | {"allowed_token_ids": [80, 90, 100, 110]},
    "bad_words": SAMPLED | {"bad_words": ["t1", "a"]},
    "json": SAMPLED
    | {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "max_tokens": 40},
    "regex": SAMPLED | {"structured_outputs": {"regex": "[a-d]{3,9}!"}, "ignore_eos": False},
    "choice and logprobs": SAMPLED
    | {"structured_outputs": {"choice": ["left", "right"]}, "ignore_eos": False, "logprobs": 1},
    "one token's choice": SAMPLED | {"structured_outputs": {"choice": ["x"]}, "ignore_eos": False},
    "grammar": SAMPLED
    | {"structured_outputs": {"grammar": 'start: ("a" | "b")+ "."'}, "ignore_eos": False},
    "one token": SAMPLED | {"max_tokens": 1},
    "the prompt alone": SAMPLED | {"echo": True, "max_tokens": 0, "logprobs": 1},
    "several prompts": SAMPLED | {"prompt": ["one", "two words"]},
    "everything": SAMPLED
    | {
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "logprobs": 2,
    }
    | {"n": 2, "stop": ["zz"], "min_tokens": 3, "logit_bias": {"90": 2}, "bad_words": ["t2"]},
}


@pytest.fixture(scope="module")
def cluster(small: Cluster) -> Cluster:
    return small


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> Iterator[Process]:
    """A router whose only prefill node is not there."""
    peers = [f"--prefill=http://127.0.0.1:{free_port()}"]
    peers += [f"--decode={node.url}" for node in cluster.of("decode")]
    with further_router(cluster, peers=peers, status="degraded") as router:
        yield router


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Any]]:
    """Answers without a feature, by what is left of it; asked for once."""
    return {}


def body(prompt: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Prompts of different lengths, some of which repeat themselves."""
    length = 30 + 11 * prompt
    tokens = [
        2 + (i * i * 7 + prompt) % 300 if prompt % 2 else 40 + (i + prompt) % 9
        for i in range(length)
    ]
    return tiny_body(tokens, max_tokens=MAX_TOKENS) | fields


async def ask(http: httpx2.AsyncClient, url: str, prompt: int, fields: dict[str, Any]) -> Any:
    """The answer, without what may differ: its id, its second, and what was found in a cache."""
    answer = await http.post(f"{url}/v1/completions", json=body(prompt, fields))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    del told["id"], told["created"], told["usage"]["prompt_tokens_details"]
    return told


async def asked(url: str, fields: dict[str, Any], *, at_once: bool, prompts: int = 4) -> list[Any]:
    async with httpx2.AsyncClient(timeout=120) as http:
        questions = [ask(http, url, prompt, fields) for prompt in range(prompts)]
        if at_once:
            return list(await asyncio.gather(*questions))
        return [await question for question in questions]


@pytest.mark.parametrize("feature", FEATURES)
async def test_disaggregated_answers_are_those_of_one_node(
    cluster: Cluster, alone: Process, plain: dict[str, list[Any]], feature: str
) -> None:
    fields, (prefill,) = FEATURES[feature], cluster.of("prefill")
    mine = await asked(prefill.url, fields, at_once=False)
    assert await asked(prefill.url, fields, at_once=True) == mine
    assert await asked(cluster.url, fields, at_once=True) == mine
    for url in (cluster.url, alone.url):
        assert await asked(url, fields, at_once=False, prompts=2) == mine[:2]
    if feature not in ("greedy", "choice and logprobs"):
        without = "greedy" if fields == SAMPLED else "temperature"
        if without not in plain:
            plain[without] = await asked(prefill.url, FEATURES[without], at_once=True)
        pairs = zip(mine, plain[without], strict=True)
        assert any(json.dumps(one) != json.dumps(other) for one, other in pairs)


async def test_log_probabilities_of_a_prompt_may_be_longer_than_a_body_may(
    cluster: Cluster,
) -> None:
    """They travel in the body of the decode leg, which is no client's."""
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    fields = {"echo": True, "logprobs": 20}
    recomputed = decode.metric("kvrelay_recomputed_prompts_total")
    fetched = decode.metric("kvrelay_fetches_total")
    (mine,) = await asked(prefill.url, fields, at_once=False, prompts=1)
    (told,) = await asked(cluster.url, fields, at_once=False, prompts=1)
    assert told == mine
    first, *listed = told["choices"][0]["logprobs"]["top_logprobs"]
    assert first is None
    numbers = [list(each.values()) for each in listed]
    assert len(json.dumps(numbers)) > SMALL_LONGEST_BODY
    counted([decode], "kvrelay_recomputed_prompts_total", recomputed)
    counted([decode], "kvrelay_fetches_total", fetched + 1)
    long = b"x" * (SMALL_LONGEST_BODY + 1)
    answer = httpx2.post(f"{decode.url}/v1/completions", content=long, timeout=60)
    assert answer.status_code == 413
    assert f"the limit is {SMALL_LONGEST_BODY}" in answer.text


def test_the_decode_node_did_speculate(cluster: Cluster) -> None:
    (decode,) = cluster.of("decode")
    assert decode.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


def test_one_node_tells_the_stages_of_one_node(alone: Process) -> None:
    stages = complete(alone.url, ids(1, 70), include_metrics=True)["kvrelay"]
    assert {"queue_ms", "prefill_ms", "decode_ms", "total_ms"} <= set(stages)
    assert not {"transfer_ms", "announce_ms", "decode_queue_ms"} & set(stages)
    # The router sees more than the node: the way there and back.
    parts = sum(stages[name] for name in ("queue_ms", "prefill_ms", "decode_ms") if name in stages)
    assert 0 < parts <= stages["total_ms"] + 1.0


def test_kv_that_is_renewed_by_a_router_is_held_as_long_as_it_is_and_no_longer(
    cluster: Cluster,
) -> None:
    (prefill,) = cluster.of("prefill")
    ticket = ticket_of(prefill, ids(1, 70), cache_salt="renewed")
    until = time.monotonic() + 1.6 * SMALL_LEASE_S
    with httpx2.Client(timeout=60) as client:
        while time.monotonic() < until:
            told = client.post(
                f"{prefill.url}/kv/renew",
                json={"request_ids": [ticket["remote_request_id"], "unknown"]},
            )
            assert told.status_code == 200
            time.sleep(0.2)
    free, total = prefill.free_blocks()
    assert free < total
    cluster.all_blocks_free(within_s=60)
