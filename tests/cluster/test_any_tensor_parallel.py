"""Prefill and decode nodes of any number of ranks: the same tokens, the same bytes, and nothing is
left of a lost rank.

Each pair is led by hand, as a third-party proxy would, so that it is known who hands over to whom.
"""

from __future__ import annotations

import functools
import os
import signal
import threading

import httpx2
import pytest
from real_cluster import (
    Cluster,
    Process,
    attentive_model,
    cached_of,
    children,
    complete,
    counted,
    text_of,
    ticket_of,
    tiny_body,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.usefixtures("nothing_is_lost"),
]

PREFILL, DECODE = (1, 2), (1, 2, 4)  # two KV heads: four ranks hold each of them twice
PAIRS = [(p, d) for p in PREFILL for d in DECODE]
TIERED = 4
LEASE_S = 1.5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One node for each number of ranks, without a router."""
    folder = tmp_path_factory.mktemp("tp")
    flags = attentive_model(folder, 1024, kv_mib=8)
    flags += f"--lease-s {LEASE_S} --heartbeat-s 0.3 --max-num-batched-tokens 64".split()
    flags += ["--kv-checksums=1", "--kv-pull=always"]
    ours = Cluster(folder, flags)
    try:
        for role, sizes in (("prefill", PREFILL), ("decode", DECODE)):
            for size in sizes:
                tier = ["--kv-host-memory=4MiB"] * (size == TIERED)
                ours.nodes.append(
                    ours.start(role, [*flags, *tier, "--tensor-parallel-size", str(size)])
                )
        ours.wait_ready(*ours.nodes)
        yield ours
    finally:
        ours.stop()


def node(cluster: Cluster, role: str, size: int) -> Process:
    return cluster.of(role)[(PREFILL if role == "prefill" else DECODE).index(size)]


def prompt_of(seed: int, tokens: int) -> list[int]:
    return [2 + (seed * 7919 + i * i) % 300 for i in range(tokens)]


@pytest.mark.parametrize(("prefill_size", "decode_size"), PAIRS)
def test_tokens_are_those_of_one_rank_alone_and_no_block_is_left(
    cluster, prefill_size, decode_size
):
    prefill, decode = node(cluster, "prefill", prefill_size), node(cluster, "decode", decode_size)
    before = decode.metric("kvrelay_fetches_total")
    for seed, tokens in enumerate((5, 200, 200)):  # the last one begins with blocks that both have
        prompt = prompt_of(10 * prefill_size + decode_size + seed % 2, tokens)
        alone = complete(node(cluster, "prefill", 1).url, prompt)
        ours = complete(decode.url, prompt, kv_transfer_params=ticket_of(prefill, prompt))
        assert text_of(ours) == text_of(alone)
    counted([decode], "kvrelay_fetches_total", before + 3)
    counted([decode], "kvrelay_fetches_failed_total", 0)
    assert decode.metric("kvrelay_fetch_checked_blocks_total") > 0
    counted([decode], "kvrelay_fetch_wrong_blocks_total", 0)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1), (2, 4)])
def test_cached_kv_of_any_number_of_ranks_is_pulled(cluster, prefill_size, decode_size):
    prefill, decode = node(cluster, "prefill", prefill_size), node(cluster, "decode", decode_size)
    prompt = prompt_of(50 + 10 * prefill_size + decode_size, 100)
    answer = complete(decode.url, prompt, max_tokens=80, return_token_ids=True)
    turn = [*prompt, *answer["choices"][0]["token_ids"], *prompt_of(1, 20)]
    sources = {"sources": [decode.as_source(176)]}
    ours = complete(prefill.url, turn, kv_transfer_params=sources)
    assert cached_of(ours) == 176
    assert text_of(ours) == text_of(complete(prefill.url, turn, cache_salt="nobody else's"))


def test_kv_of_several_ranks_outlives_its_engine(cluster):
    tiered = node(cluster, "decode", TIERED)
    prompt = prompt_of(90, 200)
    alone = text_of(complete(node(cluster, "prefill", 1).url, prompt))
    stored = "kvrelay_tier_host_stored_blocks_total"
    before = tiered.metric(stored)
    assert text_of(complete(tiered.url, prompt)) == alone
    wait_until(lambda: tiered.metric(stored) >= before + 12, "the prompt is in host memory")
    (engine,) = children(tiered.popen.pid, b"kvrelay.node.engine_process")
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: not tiered.health(), "the node knows")
    wait_until(lambda: tiered.engines_told() == 2, "another engine is told")
    cluster.wait_ready(tiered)
    again = complete(tiered.url, prompt)
    assert (cached_of(again), text_of(again)) == (192, alone)
    counted([tiered], "kvrelay_tier_host_used_blocks", 0)


def test_a_rank_that_is_lost_ends_its_node_and_takes_nothing_with_it(cluster):
    """The last test: first one of a source dies, then one of a reader in the middle of its answer."""
    (alone, shared), (reader, lost, _) = cluster.of("prefill"), cluster.of("decode")
    prompt = prompt_of(99, 200)
    expected = text_of(complete(alone.url, prompt))
    ticket = ticket_of(shared, prompt)
    kill_a_rank(shared)
    answer = complete(reader.url, prompt, kv_transfer_params=ticket)
    assert text_of(answer) == expected  # computed there
    counted([reader], "kvrelay_fetches_failed_total", 1)

    fetched = lost.metric("kvrelay_fetches_total")
    first, _ = ticket_of(alone, prompt), ticket_of(alone, prompt)  # nobody comes for the second
    more = tiny_body(prompt, max_tokens=800, kv_transfer_params=first)
    ask = functools.partial(httpx2.post, f"{lost.url}/v1/completions", json=more, timeout=60)
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: lost.metric("kvrelay_fetches_total") > fetched, "the KV is fetched")
    kill_a_rank(lost)
    asking.join(60)
    assert not asking.is_alive()
    cluster.all_blocks_free(within_s=60)


def kill_a_rank(node: Process) -> None:
    """And wait until its node has ended."""
    (engine,) = children(node.popen.pid, b"kvrelay.node.engine_process")
    os.kill(children(engine, b"kvrelay.node.ranks")[0], signal.SIGKILL)
    wait_until(lambda: node.popen.poll() is not None, "the node ends")
