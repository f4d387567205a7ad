"""What a decode node answers that computes the prompt, too, as real processes: the same as two
nodes do.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
import pytest
from real_cluster import (
    SMALL_LEASE_S,
    Cluster,
    Process,
    free_port,
    further_router,
    ticket_of,
)

pytestmark = pytest.mark.cluster

PROMPT = [3 + i * i % 300 for i in range(70)]


@pytest.fixture(scope="module")
def cluster(small: Cluster) -> Cluster:
    return small


@pytest.fixture(scope="module")
def alone(cluster: Cluster):
    """A router whose only prefill node is not there."""
    peers = [f"--prefill=http://127.0.0.1:{free_port()}"]
    peers += [f"--decode={node.url}" for node in cluster.of("decode")]
    with further_router(cluster, peers=peers, status="degraded") as router:
        yield router


def ask(
    router: Process, fields: dict[str, Any], path: str = "/v1/completions"
) -> list[dict[str, Any]]:
    """The answer's JSON bodies without what differs from one answer to the next."""
    body = {"model": "tiny", "temperature": 0.9, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    body |= fields
    answer = httpx2.post(router.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [
        answer.text
    ]
    bodies = [json.loads(line) for line in lines]
    for each in bodies:
        each.pop("id")
        each.pop("created")
    return bodies


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "stop": ["5", "e"], "ignore_eos": False},
        {"max_tokens": 1},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"structured_outputs": {"regex": "[0-9a-f]{10}"}, "ignore_eos": False},
        {"prompt": ["one", "two words"]},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_a_whole_answer_is_equal(cluster: Cluster, alone: Process, fields: dict[str, Any]) -> None:
    assert cluster.router is not None
    fields = {"prompt": PROMPT} | fields | {"cache_salt": str(fields)}
    both, one = ask(cluster.router, fields), ask(alone, fields)
    for each in (*both, *one):
        each["usage"].pop("prompt_tokens_details", None)  # the second finds what the first has left
    assert both == one


def test_it_has_the_stages_of_one_node(alone: Process) -> None:
    (answer,) = ask(alone, {"prompt": PROMPT, "include_metrics": True})
    stages = answer["kvrelay"]
    assert {"queue_ms", "prefill_ms", "decode_ms", "total_ms"} <= set(stages)
    assert not {"transfer_ms", "announce_ms", "decode_queue_ms"} & set(stages)
    # The router sees more than the node: the way there and back.
    parts = sum(
        took for name, took in stages.items() if name in ("queue_ms", "prefill_ms", "decode_ms")
    )
    assert 0 < parts <= stages["total_ms"] + 1.0


def test_kv_that_is_renewed_by_a_router_is_held_as_long_as_it_is_and_no_longer(
    cluster: Cluster,
) -> None:
    (prefill,) = cluster.of("prefill")
    ticket = ticket_of(prefill, PROMPT, cache_salt="renewed")
    until = time.monotonic() + 1.6 * SMALL_LEASE_S
    with httpx2.Client(timeout=30) as client:
        while time.monotonic() < until:
            told = client.post(
                f"{prefill.url}/kv/renew",
                json={"request_ids": [ticket["remote_request_id"], "unknown"]},
            )
            assert told.status_code == 200
            time.sleep(0.2)
    free, total = prefill.free_blocks()
    assert free < total
    cluster.all_blocks_free(within_s=SMALL_LEASE_S + 1)
