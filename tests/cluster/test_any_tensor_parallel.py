"""Prefill and decode nodes of any number of ranks: the same tokens, the same bytes, and nothing is
left of a lost rank.

Each pair is led by hand, as a third-party proxy would, so that it is known who hands over to whom.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster, Process, children, counted, tiny_model, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

PREFILL, DECODE = (1, 2), (1, 2, 4)  # two KV heads: four ranks hold each of them twice
PAIRS = [(p, d) for p in PREFILL for d in DECODE]
LEASE_S = 1.5
LAST = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One node for each number of ranks, without a router."""
    folder = tmp_path_factory.mktemp("tp")
    flags = [
        *tiny_model(folder),
        "--served-model-name",
        "tiny",
        "--kv-cache-memory-bytes",
        str(8 << 20),
    ]
    flags += ["--lease-s", str(LEASE_S), "--heartbeat-s", "0.3", "--max-num-batched-tokens", "64"]
    ours = Cluster(folder, flags)
    try:
        for role, sizes in (("prefill", PREFILL), ("decode", DECODE)):
            ours.nodes += [
                ours.start(role, [*flags, "--tensor-parallel-size", str(size)]) for size in sizes
            ]
        ours.wait_ready(*ours.nodes)
        yield ours
    finally:
        ours.stop()


def node(cluster: Cluster, role: str, size: int) -> Process:
    return cluster.of(role)[(PREFILL if role == "prefill" else DECODE).index(size)]


def body(seed: int, tokens: int) -> dict[str, Any]:
    prompt = [2 + (seed * 7919 + i * i) % 300 for i in range(tokens)]
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": LAST,
        "temperature": 0,
        "ignore_eos": True,
    }


def complete(node: Process, request: dict[str, Any]) -> dict[str, Any]:
    answer = httpx2.post(f"{node.url}/v1/completions", json=request, timeout=30)
    assert answer.status_code == 200, answer.text + node.tail()
    return answer.json()


def handed_over(prefill: Process, decode: Process, request: dict[str, Any]) -> str:
    """The text of a request whose prompt one node computes and whose other tokens another one."""
    first = complete(
        prefill, request | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    )
    ticket = first["kv_transfer_params"]
    answer = complete(decode, request | {"kv_transfer_params": ticket})
    return answer["choices"][0]["text"]


@pytest.mark.parametrize(("prefill_size", "decode_size"), PAIRS)
def test_tokens_are_those_of_one_rank_alone_and_no_block_is_left(
    cluster, prefill_size, decode_size
):
    prefill, decode = node(cluster, "prefill", prefill_size), node(cluster, "decode", decode_size)
    before = decode.metric("kvrelay_fetches_total")
    for seed, tokens in enumerate((5, 200, 200)):  # the last one begins with blocks that both have
        request = body(10 * prefill_size + decode_size + seed % 2, tokens)
        alone = complete(node(cluster, "prefill", 1), request)["choices"][0]["text"]
        assert handed_over(prefill, decode, request) == alone
    counted([decode], "kvrelay_fetches_total", before + 3)
    counted([decode], "kvrelay_fetches_failed_total", 0)
    cluster.all_blocks_free(within_s=LEASE_S + 1)


def test_the_bytes_of_every_pair_are_those_that_were_filled_in(cluster):
    urls = [f"--{each.role}={each.url}" for each in cluster.nodes]
    argv = [sys.executable, "-m", "kvrelay.cli", "doctor", *urls, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["failures"]) == (0, []), done.stderr
    assert {(pair["prefill"], pair["decode"]) for pair in report["pairs"]} == {
        (f"prefill-{p}", f"decode-{d}") for p in range(len(PREFILL)) for d in range(len(DECODE))
    }
    assert all(sample["verified"] for pair in report["pairs"] for sample in pair["samples"])
    assert {pair["plane"] for pair in report["pairs"]} == {"direct"}
    cluster.all_blocks_free(within_s=LEASE_S + 1)


def test_a_rank_that_is_lost_ends_its_node_and_takes_nothing_with_it(cluster):
    """The last test: first one of a source dies, then one of a reader in the middle of its answer."""
    (alone, shared), (reader, lost, _) = cluster.of("prefill"), cluster.of("decode")
    request = body(99, 200)
    expected = complete(alone, request)["choices"][0]["text"]
    ticket = complete(
        shared, request | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    )
    kill_a_rank(shared)
    answer = complete(reader, request | {"kv_transfer_params": ticket["kv_transfer_params"]})
    assert answer["choices"][0]["text"] == expected  # computed there
    counted([reader], "kvrelay_fetches_failed_total", 1)

    fetched = lost.metric("kvrelay_fetches_total")
    first = complete(
        alone, request | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    )
    left = complete(
        alone, request | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    )
    assert left["kv_transfer_params"]  # nobody will ever come with it
    more = request | {"max_tokens": 800, "kv_transfer_params": first["kv_transfer_params"]}
    asking = threading.Thread(
        target=lambda: httpx2.post(f"{lost.url}/v1/completions", json=more, timeout=30)
    )
    asking.start()
    wait_until(lambda: lost.metric("kvrelay_fetches_total") > fetched, 10, "the KV is fetched")
    kill_a_rank(lost)
    asking.join(30)
    assert not asking.is_alive()
    cluster.all_blocks_free(within_s=LEASE_S + 1)


def kill_a_rank(node: Process) -> None:
    """And wait until its node has ended."""
    (engine,) = children(node.popen.pid, b"kvrelay.node.engine_process")
    os.kill(children(engine, b"kvrelay.node.ranks")[0], signal.SIGKILL)
    wait_until(lambda: node.popen.poll() is not None, 20, "the node ends")
