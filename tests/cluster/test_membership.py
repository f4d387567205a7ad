"""Nodes that announce themselves, meet, drain, and are restarted one after the other under streams: real processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx2
import pytest
from real_cluster import START_DEADLINE_S, Cluster, Process, free_port, tiny_model, wait_until

from kvrelay import cli

pytestmark = pytest.mark.cluster

STREAMS, TOKENS = 8, 200
KEYS = {"KVRELAY_NODE_API_KEY": "nodes", "KVRELAY_ADMIN_KEY": "operator"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """2P2D over NIXL. No list of nodes: they tell the router that they are there."""
    folder = tmp_path_factory.mktemp("members")
    flags = [*tiny_model(folder), "--served-model-name", "tiny", "--kv-connector", "nixl"]
    flags += ["--kv-cache-memory", str(8 << 20)]
    heartbeats = free_port()
    cluster = Cluster(folder, flags)
    try:
        flags += ["--router", f"tcp://127.0.0.1:{heartbeats}"]
        cluster.nodes = [cluster.start(role, flags, env=KEYS) for role in ("prefill", "prefill", "decode", "decode")]
        router_flags = ["--heartbeat-port", str(heartbeats), "--alias", "best=tiny"]
        cluster.router = cluster.start("router", router_flags, env=KEYS)
        cluster.wait_ready(*cluster.nodes, cluster.router)
        cluster.wait_met(4)
        yield cluster
    finally:
        cluster.stop()


def health(cluster: Cluster) -> dict[str, Any]:
    return json.loads(httpx2.get(f"{cluster.url}/health", timeout=5).content)


def connections(node: Process) -> list[str]:
    """The peers that a decode node has connected its data plane to, in order."""
    return re.findall(r"KV of (\S+) comes by nixl", node.log.read_text())


def test_the_first_request_finds_its_pair_connected(cluster: Cluster) -> None:
    before = [connections(node) for node in cluster.of("decode")]
    assert [len(set(peers)) for peers in before] == [2, 2]
    assert health(cluster)["pairs"] == {"met": 4, "failed": []}
    fetched = sum(node.metric("kvrelay_fetches_total") for node in cluster.of("decode"))
    for at in range(4):
        body = {"model": "best", "prompt": f"{at} " + "x" * 100, "max_tokens": 4, "ignore_eos": True}
        answer = httpx2.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"
    assert sum(node.metric("kvrelay_fetches_total") for node in cluster.of("decode")) == fetched + 4
    assert [connections(node) for node in cluster.of("decode")] == before
    cluster.all_blocks_free(within_s=4)


async def _stream(session: aiohttp.ClientSession, url: str, at: int, stop: asyncio.Event) -> int:
    """Ask for one answer after the other until told to stop; how many there were. Each must be whole."""
    done = 0
    while not stop.is_set():
        body = {"model": "tiny", "prompt": f"{at} {done} " + "y" * 60, "max_tokens": TOKENS, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body | {"stream": True, "temperature": 0}) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        assert text.endswith("data: [DONE]\n\n"), text[-300:]
        assert '"finish_reason":"length"' in text, text[-300:]
        done += 1
    return done


async def test_a_rolling_restart_under_streams_loses_none(cluster: Cluster) -> None:
    """By the operator's way (drain, see that it is idle, restart) and by SIGTERM alone."""
    stop = asyncio.Event()
    generations = {node["url"]: node["generation"] for node in health(cluster)["nodes"]}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        streams = [asyncio.create_task(_stream(session, cluster.url, at, stop)) for at in range(STREAMS)]
        by_router, by_node = ["--router", cluster.url, "--admin-key", "operator"], ["--node-api-key", "nodes"]
        (p, q), (d, e) = cluster.of("prefill"), cluster.of("decode")
        for drained, how, other in ((p, by_router, d), (e, by_node, q)):
            await asyncio.to_thread(_restart, cluster, drained, how, other, generations)
            assert not any(stream.done() for stream in streams)
        stop.set()
        counts = await asyncio.gather(*streams)
    assert min(counts) > 0
    broken = [line for line in cluster.router.log.read_text().splitlines() if "leg broke" in line]  # type: ignore[union-attr]
    assert broken == []
    text = httpx2.get(f"{cluster.url}/metrics", timeout=5).text
    assert set(re.findall(r'requests_total\{path="/v1/completions",status="(\d+)"', text)) == {"200"}
    # Nothing was computed twice: KV was fetched from prefill nodes that were ending.
    assert sum(node.metric("kvrelay_recomputed_prompts_total") for node in cluster.of("decode")) == 0
    cluster.wait_met(4)
    cluster.all_blocks_free(within_s=4)


def _restart(cluster: Cluster, drained: Process, how: list[str], other: Process, was: dict[str, str]) -> None:
    """Restart two nodes, one of them drained before it is told to end."""
    assert cli.run(["drain", drained.url, *how, "--wait", "60"]) == 0
    answer = httpx2.get(f"{drained.url}/health", timeout=5)
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    pair = (drained, other)
    for node in pair:
        node.kill(signal.SIGTERM)
    for node in pair:
        node.popen.wait(30)
    # Their last word reaches the router before they end, or with it; three missed heartbeats would be ten seconds.
    ended = {node.url for node in pair}
    wait_until(lambda: not ended & {node["url"] for node in health(cluster)["nodes"]}, 5, "the router forgets them")
    fresh = [cluster.restart(node, env=KEYS) for node in pair]
    cluster.wait_ready(*fresh)

    def back() -> bool:
        seen = {node["url"]: node for node in health(cluster)["nodes"]}
        return all(
            node.url in seen and seen[node.url]["up"] and seen[node.url]["generation"] != was[node.url]
            for node in fresh
        )

    wait_until(back, START_DEADLINE_S, "the router uses the restarted nodes")
