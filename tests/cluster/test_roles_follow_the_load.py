"""A router of two processes finds that three decode nodes are too many for long prompts, and makes
one a prefill node.

All by itself: nobody asks for a change of roles, and no stream is harmed by it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx2
import pytest
from real_cluster import Cluster, tiny_model, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

STREAMS, PROMPTS = 16, 4
WORDS = 3000
CHANGES_WITHIN_S = 180.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1P3D."""
    folder = tmp_path_factory.mktemp("roles")
    flags = [
        *tiny_model(folder, 8192),
        "--served-model-name",
        "tiny",
        "--kv-cache-memory-bytes",
        str(32 << 20),
    ]
    cluster = Cluster(folder, flags)
    try:
        cluster.nodes = [
            cluster.start(role, flags) for role in ("prefill", "decode", "decode", "decode")
        ]
        listed = [f"--{node.role}={node.url}" for node in cluster.nodes]
        others = [
            "--tpot-target-ms",
            "60000",
            "--least-decode",
            "2",
            "--workers",
            "2",
            "--log-format",
            "json",
        ]
        cluster.router = cluster.start("router", [*listed, *others])
        cluster.wait_ready(*cluster.nodes, cluster.router)
        cluster.wait_met(3)
        yield cluster
    finally:
        cluster.stop()


def body(at: int, salt: str) -> dict[str, Any]:
    """Of one of few prompts, whose answers are known; `salt` keeps it out of the prefix caches."""
    prompt = f"{at} " + "y" * WORDS
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "cache_salt": salt,
    }


def picture(cluster: Cluster) -> Any:
    """As the console shows it; nothing before the first look."""
    told = httpx2.get(f"{cluster.url}/console/state", headers=cluster.operator, timeout=10)
    seen = json.loads(told.content)["roles"]
    return seen[0] if seen else {"changes": []}


async def ask_for_ever(
    session: aiohttp.ClientSession, url: str, at: int, wanted: list[str], stop: asyncio.Event
) -> int:
    done = 0
    for turn in itertools.count():
        if stop.is_set():
            break
        which = (at + done) % PROMPTS
        asked = body(which, f"{at}-{turn}") | {"stream": True}
        async with session.post(f"{url}/v1/completions", json=asked) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        assert text.endswith("data: [DONE]\n\n"), text[-300:]
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted[which]
        done += 1
    return done


async def test_prompts_that_one_node_cannot_compute_get_another_one(cluster: Cluster) -> None:
    def answer(at: int) -> str:
        said = httpx2.post(
            f"{cluster.url}/v1/completions", json=body(at, "undisturbed"), timeout=120
        )
        return str(said.json()["choices"][0]["text"])

    wanted = [await asyncio.to_thread(answer, at) for at in range(PROMPTS)]
    stop = asyncio.Event()

    def changed() -> Any:
        assert not any(each.done() for each in streams), [each for each in streams if each.done()]
        roles = [
            json.loads(httpx2.get(f"{node.url}/health", timeout=5).content)["role"]
            for node in cluster.nodes
        ]
        return roles.count("prefill") == 2 and picture(cluster)["changes"][0]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        streams = [
            asyncio.create_task(ask_for_ever(session, cluster.url, at, wanted, stop))
            for at in range(STREAMS)
        ]
        try:
            change = await asyncio.to_thread(
                wait_until, changed, CHANGES_WITHIN_S, "a node has changed its role", 0.5
            )
            before = [node.metric("kvrelay_leases_released_total") for node in cluster.nodes]
            flipped = next(
                at for at, node in enumerate(cluster.nodes) if node.url == change["node"]
            )

            def serves() -> bool:
                return (
                    cluster.nodes[flipped].metric("kvrelay_leases_released_total")
                    > before[flipped] + 2
                )

            await asyncio.to_thread(wait_until, serves, 60, "prompts are computed on it", 0.5)
        finally:
            stop.set()
        assert sum(await asyncio.gather(*streams)) > 4
    assert change["role"] == "prefill"
    assert change["node"] == max(node.url for node in cluster.of("decode"))
    roles = [
        json.loads(httpx2.get(f"{node.url}/health", timeout=5).content)["role"]
        for node in cluster.nodes
    ]
    assert sorted(roles) == ["decode", "decode", "prefill", "prefill"]
    text = httpx2.get(f"{cluster.url}/metrics", timeout=10).text
    changes = r'kvrelay_router_role_changes_total\{model_name="tiny",outcome="(\w+)",role="prefill"\} (\S+)'
    assert re.findall(changes, text) == [("begun", "1.0")]
    assert re.findall(r'kvrelay_router_role_use\{model_name="tiny",role="(\w+)"\}', text) == [
        "prefill",
        "decode",
    ]
    assert cluster.router is not None
    lines = [line for line in cluster.router.log.read_text().splitlines() if "roles: " in line]
    assert [change["node"] in line and change["why"] in line for line in lines] == [True]
    assert [
        line for line in cluster.router.log.read_text().splitlines() if "request failed on" in line
    ] == []
    cluster.all_blocks_free(within_s=10)
