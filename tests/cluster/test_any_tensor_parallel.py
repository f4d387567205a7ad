"""Prefill and decode nodes of any number of ranks: the same tokens, the same bytes, and nothing is left of a lost rank.

Each pair is led by hand, as a third-party proxy would, so that it is known who hands over to whom.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster, Process, tiny_model, wait_until

pytestmark = pytest.mark.cluster

PREFILL, DECODE = (1, 2), (1, 2, 4)  # two KV heads: four ranks hold each of them twice
PAIRS = [(p, d) for p in PREFILL for d in DECODE]
LEASE_S = 1.5
LAST = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One node for each number of ranks, without a router."""
    folder = tmp_path_factory.mktemp("tp")
    flags = [*tiny_model(folder), "--served-model-name", "tiny", "--kv-cache-memory", str(8 << 20)]
    flags += ["--lease-s", str(LEASE_S), "--heartbeat-s", "0.3", "--max-batched-tokens", "64"]
    ours = Cluster(folder, flags)
    try:
        for role, sizes in (("prefill", PREFILL), ("decode", DECODE)):
            ours.nodes += [ours.start(role, [*flags, "--tensor-parallel", str(size)]) for size in sizes]
        ours.wait_ready(*ours.nodes)
        yield ours
    finally:
        ours.stop()


def node(cluster: Cluster, role: str, size: int) -> Process:
    return cluster.of(role)[(PREFILL if role == "prefill" else DECODE).index(size)]


def body(seed: int, tokens: int) -> dict[str, Any]:
    prompt = [2 + (seed * 7919 + i * i) % 300 for i in range(tokens)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": LAST, "temperature": 0, "ignore_eos": True}


def complete(node: Process, request: dict[str, Any]) -> dict[str, Any]:
    answer = httpx2.post(f"{node.url}/v1/completions", json=request, timeout=30)
    assert answer.status_code == 200, answer.text + node.tail()
    return answer.json()


def handed_over(prefill: Process, decode: Process, request: dict[str, Any]) -> str:
    """The text of a request whose prompt one node computes and whose other tokens another one."""
    first = complete(prefill, request | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    ticket = first["kv_transfer_params"]
    answer = complete(decode, request | {"kv_transfer_params": ticket})
    return answer["choices"][0]["text"]


@pytest.mark.parametrize(("prefill_size", "decode_size"), PAIRS)
def test_tokens_are_those_of_one_rank_alone_and_no_block_is_left(cluster, prefill_size, decode_size):
    prefill, decode = node(cluster, "prefill", prefill_size), node(cluster, "decode", decode_size)
    before = decode.metric("kvrelay_fetches_total")
    for seed, tokens in enumerate((5, 200, 200)):  # the last one begins with blocks that both have
        request = body(10 * prefill_size + decode_size + seed % 2, tokens)
        alone = complete(node(cluster, "prefill", 1), request)["choices"][0]["text"]
        assert handed_over(prefill, decode, request) == alone
    assert decode.metric("kvrelay_fetches_total") == before + 3
    assert decode.metric("kvrelay_fetches_failed_total") == 0
    cluster.all_blocks_free(within_s=LEASE_S + 1)
