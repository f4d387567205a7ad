"""Nodes that announce themselves, meet, drain, and are restarted one after the other under streams:
real processes.

The nodes begin with the code of the release before this one, where it is to be had, and are
restarted with this one's; beside the router stands one of that release. So all of it is a rolling
upgrade, too: each role and the router meet both. That release's heartbeats are another protocol:
its router has a list of nodes, and its nodes are added by hand.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from previous_release import previous_release
from real_cluster import (
    START_DEADLINE_S,
    Cluster,
    Process,
    counted,
    free_port,
    stream_until,
    tiny_body,
    tiny_model,
    wait_until,
)

from kvrelay import cli
from kvrelay.wire.versions import LEGS, RELEASE

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_lost")]

STREAMS, TOKENS = 4, 100
MIXED = 6
"""Hand-overs to each decode node between two restarts."""
KEYS = {"KVRELAY_NODE_API_KEY": "nodes", "KVRELAY_ADMIN_KEY": "operator"}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process of the release before this one."""
    code: Path | None = previous_release(tmp_path_factory.mktemp("release"))
    return KEYS if code is None else KEYS | {"PYTHONPATH": str(code)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, before: dict[str, str]) -> Iterator[Cluster]:
    """2P2D over NIXL. Once nodes are of this release they also tell the router that they are there."""
    folder = tmp_path_factory.mktemp("members")
    flags = [*tiny_model(folder), "--kv-connector=nixl"]
    heartbeats = free_port()
    cluster = Cluster(folder, flags)
    try:
        roles = ("prefill", "prefill", "decode", "decode")
        cluster.nodes = [cluster.start(role, flags, env=before) for role in roles]
        # Each prompt is handed over, and by each prefill node to each decode node.
        every = ["--strict-roles", "--prefill-policy=round_robin"]
        every += ["--decode-policy=least_queue"]
        router_flags = ["--heartbeat-port", str(heartbeats), "--alias=best=tiny", *every]
        listed = [f"--{node.role}={node.url}" for node in cluster.nodes]
        cluster.router = cluster.start("router", [*router_flags, *listed], env=KEYS)
        # At the nodes of this release it is the other way round: the router is of the one before.
        cluster.others = [cluster.start("router", [*listed, *every], env=before)]
        for node in cluster.nodes:
            node.argv = [
                *node.argv,
                "--router",
                f"udp://127.0.0.1:{heartbeats}",
            ]
        cluster.wait_ready(*cluster.nodes, cluster.router, *cluster.others)
        cluster.wait_up()
        yield cluster
    finally:
        cluster.stop()


def health(cluster: Cluster) -> dict[str, Any]:
    return nodes_of(cluster.url)


def nodes_of(url: str) -> dict[str, Any]:
    """What a router says of itself and its nodes."""
    return json.loads(httpx2.get(f"{url}/health", timeout=60).content)


async def test_a_rolling_restart_under_streams_loses_none(cluster: Cluster) -> None:
    """By the operator's way (drain, see that it is idle, restart) and by SIGTERM alone; through
    either router.
    """
    stop = asyncio.Event()
    urls = [cluster.url, *(other.url for other in cluster.others)]
    generations = {node["url"]: node["generation"] for node in health(cluster)["nodes"]}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        streams = [
            asyncio.create_task(
                stream_until(
                    stop,
                    session,
                    urls[at % 2],
                    lambda done, at=at: tiny_body(f"{at} {done} " + "y" * 60, max_tokens=TOKENS),
                    pause_s=1.0,  # nodes that start beside the streams shall have a core
                )
            )
            for at in range(STREAMS)
        ]
        (p, q), (d, e) = cluster.of("prefill"), cluster.of("decode")
        for drained, other in ((p, d), (e, q)):
            await asyncio.to_thread(_restart, cluster, drained, other, generations)
            # Two of each role are of either release now, or all are new.
            fetched = {node: node.metric("kvrelay_fetches_total") for node in cluster.of("decode")}
            await asyncio.to_thread(
                wait_until,
                lambda fetched=fetched: all(
                    node.metric("kvrelay_fetches_total") >= before + MIXED
                    for node, before in fetched.items()
                ),
                f"{MIXED} hand-overs to each decode node",
            )
            assert not any(stream.done() for stream in streams)
        stop.set()
        counts = await asyncio.gather(*streams)
    assert min(counts) > 0
    for router in (cluster.router, *cluster.others):
        assert router is not None
        broken = [
            line for line in router.log.read_text().splitlines() if "request failed on" in line
        ]
        # Whose heartbeats a router does not hear may have ended since its last health check: that
        # leg goes elsewhere.
        refused = ("there is no connection", "Cannot connect to host")  # of this release, of that
        # A node of the release before ends while it tokenizes a request: it goes elsewhere, too.
        moved = (*refused, "the node ended the")
        assert [line for line in broken if not any(text in line for text in moved)] == []
    for url in urls:
        text = httpx2.get(f"{url}/metrics", timeout=60).text
        assert set(
            re.findall(r'requests_total\{[^}]*path="/v1/completions",status="(\d+)"', text)
        ) == {"200"}
    assert {(node["release"], node["leg_version"]) for node in health(cluster)["nodes"]} == {
        (RELEASE, LEGS.newest)
    }
    # Nothing was computed twice: KV was fetched from prefill nodes that were ending.
    counted(cluster.of("decode"), "kvrelay_recomputed_prompts_total", 0)


def _restart(cluster: Cluster, drained: Process, other: Process, was: dict[str, str]) -> None:
    """Restart two nodes, one of them drained before it is told to end."""
    assert cli.run(["drain", drained.url, "--node-api-key=nodes", "--wait=60"]) == 0
    answer = httpx2.get(f"{drained.url}/health", timeout=60)
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    pair = (drained, other)
    for node in pair:
        node.kill(signal.SIGTERM)
    for node in pair:
        node.popen.wait(60)
    fresh = [cluster.restart(node, env=KEYS) for node in pair]
    cluster.wait_ready(*fresh)

    def back(url: str) -> bool:
        seen = {node["url"]: node for node in nodes_of(url)["nodes"]}
        return all(
            node.url in seen
            and seen[node.url]["up"]
            and seen[node.url]["generation"] != was[node.url]
            for node in fresh
        )

    for router in (cluster.url, *(other.url for other in cluster.others)):
        wait_until(
            lambda url=router: back(url),
            f"{router} uses the restarted nodes",
            deadline_s=START_DEADLINE_S,
        )
