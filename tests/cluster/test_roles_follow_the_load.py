"""A router of two processes finds that two decode nodes are too many for long prompts, and makes
one a prefill node.

All by itself: nobody asks for a change of roles, and no stream is harmed by it.
"""

from __future__ import annotations

import asyncio
import json
import os
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
    stream_until,
    text_of,
    tiny_body,
    tiny_model,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.usefixtures("nothing_is_lost"),
]

STREAMS, PROMPTS = 16, 4
WORDS = 3000
CHANGES_WITHIN_S = 180.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Cluster]:
    """1P2D, whose router looks each second."""
    folder = tmp_path_factory.mktemp("roles")
    # Nodes reckon in step times of their start: what slows the machine later lowers their use.
    soon = "roles.EVERY_S, roles.LIMIT = 1.0, 0.3"
    (folder / "sitecustomize.py").write_text(f"from kvrelay.router import roles\n{soon}\n")
    env = {"PYTHONPATH": os.pathsep.join(map(str, (folder, repository)))}
    flags = tiny_model(folder, 8192, kv_mib=32)
    cluster = Cluster(folder, flags)
    try:
        cluster.nodes = [cluster.start(role, flags) for role in ("prefill", "decode", "decode")]
        listed = [f"--{node.role}={node.url}" for node in cluster.nodes]
        others = ["--tpot-target-ms=60000", "--least-decode=1", "--workers=2", "--log-format=json"]
        cluster.router = cluster.start("router", [*listed, *others], env=env)
        cluster.wait_ready(*cluster.nodes, cluster.router)
        cluster.wait_up()
        yield cluster
    finally:
        cluster.stop()


def body(at: int, salt: str) -> dict[str, Any]:
    """Return a request of few prompts, whose answers are known; `salt` keeps caches out of it."""
    return tiny_body(f"{at} " + "y" * WORDS, max_tokens=4, cache_salt=salt)


def role_of(node: Process) -> str:
    return str(json.loads(httpx2.get(f"{node.url}/health", timeout=5).content)["role"])


async def test_prompts_that_one_node_cannot_compute_get_another_one(cluster: Cluster) -> None:
    def answer(at: int) -> str:
        return text_of(complete(cluster.url, **body(at, "undisturbed")))

    wanted = [await asyncio.to_thread(answer, at) for at in range(PROMPTS)]
    stop = asyncio.Event()

    def flipped() -> Process | None:
        assert not any(each.done() for each in streams), [each for each in streams if each.done()]
        return next((node for node in cluster.of("decode") if role_of(node) == "prefill"), None)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        streams = [
            asyncio.create_task(
                stream_until(
                    stop,
                    session,
                    cluster.url,
                    lambda done, at=at: body((at + done) % PROMPTS, f"{at}-{done}"),
                    lambda done, at=at: wanted[(at + done) % PROMPTS],
                )
            )
            for at in range(STREAMS)
        ]
        try:
            node = await asyncio.to_thread(
                wait_until, flipped, CHANGES_WITHIN_S, "a node has changed its role", 0.5
            )
            before = node.metric("kvrelay_leases_released_total")

            def serves() -> bool:
                return bool(node.metric("kvrelay_leases_released_total") > before + 2)

            await asyncio.to_thread(wait_until, serves, 60, "prompts are computed on it", 0.5)
        finally:
            stop.set()
        assert sum(await asyncio.gather(*streams)) > 4
    assert node.url == max(each.url for each in cluster.of("decode"))
    assert sorted(map(role_of, cluster.nodes)) == ["decode", "prefill", "prefill"]
    assert cluster.router is not None
    assert "request failed on" not in cluster.router.log.read_text()
