"""Real nodes change their roles under streams: none is harmed, what is asked next uses the new
ratio, and back again; by an operator's order, and of a router's own accord.

Two routers follow orders: one with a list of nodes and two processes, one that hears heartbeats.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from real_cluster import (
    Cluster,
    Process,
    complete,
    free_port,
    stream_until,
    text_of,
    tiny_body,
    tiny_model,
    wait_until,
)

from kvrelay import cli

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.usefixtures("nothing_is_lost"),
]

STREAMS, TOKENS = 6, 150
CROWD, WORDS = 16, 3000
CHANGES_WITHIN_S = 180.0
PROMPTS = 4
"""Each with a text of its own, whose undisturbed answer is known."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """2P1D."""
    folder = tmp_path_factory.mktemp("roles")
    beats = free_port()
    flags = [*tiny_model(folder, 8192, kv_mib=32), "--router", f"udp://127.0.0.1:{beats}"]
    cluster = Cluster(folder, flags)
    try:
        cluster.nodes = [cluster.start(role, flags) for role in ("prefill", "prefill", "decode")]
        every = [
            "--strict-roles",
            *(f"--{role}-policy=round_robin" for role in ("prefill", "decode")),
        ]
        listed = [f"--{node.role}={node.url}" for node in cluster.nodes]
        cluster.router = cluster.start("router", [*listed, *every, "--workers=2"])
        cluster.others = [cluster.start("router", ["--heartbeat-port", str(beats), *every])]
        cluster.wait_ready(*cluster.nodes, cluster.router, *cluster.others)
        wait_until(
            lambda: all(ratio(url) == (2, 1) for url in urls(cluster)), "both routers see 2P1D"
        )
        cluster.wait_up()
        yield cluster
    finally:
        cluster.stop()


def urls(cluster: Cluster) -> list[str]:
    return [cluster.url, *(other.url for other in cluster.others)]


def health(url: str) -> dict[str, Any]:
    return json.loads(httpx2.get(f"{url}/health", timeout=60).content)


def ratio(url: str) -> tuple[int, int]:
    """Prefill and decode nodes that are up."""
    told = health(url)
    return told["prefill"]["up"], told["decode"]["up"]


def all_workers_see(cluster: Cluster, wanted: tuple[int, int]) -> bool:
    """Return whether each process of the first router sees so many prefill and decode nodes."""
    answer = httpx2.get(f"{cluster.url}/console/state", headers=cluster.operator, timeout=60)
    nodes = json.loads(answer.content)["nodes"]
    roles = [node["role"] for node in nodes]
    seen = roles.count("prefill"), roles.count("decode")
    return seen == wanted and all(node["up_in"] == 2 for node in nodes)


def body(at: int) -> dict[str, Any]:
    return tiny_body(f"{at} " + "y" * 60, max_tokens=TOKENS)


def handed_over(node: Process) -> tuple[float, float]:
    """Prompts whose KV it gave away, and fetches of its own, since its start."""
    return node.metric("kvrelay_leases_released_total"), node.metric("kvrelay_fetches_total")


def generated(node: Process) -> dict[str, float]:
    """Tokens by the role in which they were generated."""
    text = httpx2.get(f"{node.url}/metrics", timeout=60).text
    found = re.findall(r'vllm:generation_tokens_total\{.*role="(\w+)"\} (\S+)', text)
    return {role: float(tokens) for role, tokens in found}


def flip(node: Process, role: str) -> None:
    """Change the role of a node as an operator does."""
    assert cli.run(["role", node.url, role]) == 0


async def test_streams_are_unharmed_by_flips_and_use_what_comes_of_them(cluster: Cluster) -> None:
    wanted = [text_of(complete(cluster.url, **body(at))) for at in range(PROMPTS)]
    node = cluster.nodes[1]
    engine, blocks = node.popen.pid, node.free_blocks()[1]
    generation = health(node.url)["generation"]
    stop = asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        streams = [
            asyncio.create_task(
                stream_until(
                    stop,
                    session,
                    urls(cluster)[at % 2],
                    lambda done, at=at: body((at + done) % PROMPTS),
                    lambda done, at=at: wanted[(at + done) % PROMPTS],
                )
            )
            for at in range(STREAMS)
        ]
        for role, seen in (("decode", (1, 2)), ("prefill", (2, 1))):
            await asyncio.to_thread(flip, node, role)
            for url in urls(cluster):
                await asyncio.to_thread(
                    wait_until,
                    lambda url=url, seen=seen: ratio(url) == seen,
                    f"{url} sees {seen}",
                )
            await asyncio.to_thread(
                wait_until,
                lambda seen=seen: all_workers_see(cluster, seen),
                "all processes see it",
            )
            gave, took = await asyncio.to_thread(handed_over, node)
            fresh = (
                # An answer that goes on elsewhere as roles change again has fewer tokens here.
                lambda took=took: (
                    handed_over(node)[1] > took + 4 and generated(node)["decode"] > 4 * TOKENS
                ),
                lambda gave=gave: handed_over(node)[0] > gave + 4,
            )
            await asyncio.to_thread(
                wait_until, fresh[role == "prefill"], f"it serves as a {role} node"
            )
            assert not any(each.done() for each in streams), [
                each for each in streams if each.done()
            ]
        stop.set()
        assert min(await asyncio.gather(*streams)) > 0
    told = health(node.url)
    assert (told["role"], told["flips"], told["generation"], node.popen.pid) == (
        "prefill",
        2,
        generation,
        engine,
    )
    assert node.free_blocks()[1] == blocks
    for router in (cluster.router, *cluster.others):
        assert router is not None
        assert "request failed on" not in router.log.read_text()
    for url in urls(cluster):
        text = httpx2.get(f"{url}/metrics", timeout=60).text
        assert set(
            re.findall(r'requests_total\{[^}]*path="/v1/completions",status="(\d+)"', text)
        ) == {"200"}
    # Nothing was computed twice, and what each role did is counted apart.
    assert sum(each.metric("kvrelay_recomputed_prompts_total") for each in cluster.nodes) == 0
    assert generated(node)["prefill"] < generated(node)["decode"]


def test_a_role_that_it_cannot_have_and_requests_of_its_old_role_are_refused(
    cluster: Cluster,
) -> None:
    p = cluster.nodes[0]
    for wanted in ("aggregated", "chef"):
        answer = httpx2.post(f"{p.url}/admin/role", json={"role": wanted}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )
    assert cli.run(["role", p.url, "chef"]) == 2
    # Asked in the old role after it has changed, as by a router that does not know yet: nobody's
    # fault.
    flip(p, "decode")
    prefill_leg = body(0) | {"kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx2.post(f"{p.url}/v1/completions", json=prefill_leg, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    flip(p, "prefill")


async def test_prompts_that_one_node_cannot_compute_get_another_one(
    cluster: Cluster, repository: Path
) -> None:
    """Two decode nodes are too many for long prompts: a router of two processes finds it."""
    one, *decodes = cluster.nodes
    await asyncio.to_thread(flip, decodes[0], "decode")
    # Nodes reckon in step times of their start: what slows the machine later lowers their use.
    soon = "roles.EVERY_S, roles.LIMIT = 1.0, 0.3"
    folder = cluster.folder
    (folder / "sitecustomize.py").write_text(f"from kvrelay.router import roles\n{soon}\n")
    env = {"PYTHONPATH": os.pathsep.join(map(str, (folder, repository)))}
    for router in (cluster.router, *cluster.others):
        assert router is not None
        router.kill()
    listed = [f"--prefill={one.url}", *(f"--decode={node.url}" for node in decodes)]
    others = ["--tpot-target-ms=60000", "--least-decode=1", "--workers=2"]
    cluster.router = cluster.start("router", [*listed, *others], env=env)
    cluster.wait_ready(cluster.router)
    cluster.wait_up()

    def asked(at: int, salt: str) -> dict[str, Any]:
        """Return a request of few prompts, whose answers are known; `salt` keeps caches out of it."""
        return tiny_body(f"{at} " + "y" * WORDS, max_tokens=4, cache_salt=salt)

    def answer(at: int) -> str:
        return text_of(complete(cluster.url, **asked(at, "undisturbed")))

    wanted = [await asyncio.to_thread(answer, at) for at in range(PROMPTS)]
    stop = asyncio.Event()

    def flipped() -> Process | None:
        assert not any(each.done() for each in streams), [each for each in streams if each.done()]
        return next((node for node in decodes if health(node.url)["role"] == "prefill"), None)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        streams = [
            asyncio.create_task(
                stream_until(
                    stop,
                    session,
                    cluster.url,
                    lambda done, at=at: asked((at + done) % PROMPTS, f"{at}-{done}"),
                    lambda done, at=at: wanted[(at + done) % PROMPTS],
                )
            )
            for at in range(CROWD)
        ]
        try:
            node = await asyncio.to_thread(
                wait_until,
                flipped,
                "a node has changed its role",
                deadline_s=CHANGES_WITHIN_S,
                interval_s=0.5,
            )
            before = node.metric("kvrelay_leases_released_total")

            def serves() -> bool:
                return bool(node.metric("kvrelay_leases_released_total") > before + 2)

            await asyncio.to_thread(
                wait_until, serves, "prompts are computed on it", interval_s=0.5
            )
        finally:
            stop.set()
        assert sum(await asyncio.gather(*streams)) > 4
    assert node.url == max(each.url for each in decodes)
    assert sorted(health(node.url)["role"] for node in cluster.nodes) == [
        "decode",
        "prefill",
        "prefill",
    ]
    assert cluster.router is not None
    assert "request failed on" not in cluster.router.log.read_text()
