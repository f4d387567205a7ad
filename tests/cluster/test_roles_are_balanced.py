"""A router of two processes finds that three decode nodes are too many for long prompts, and makes one a prefill node.

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
    folder = tmp_path_factory.mktemp("balance")
    flags = [*tiny_model(folder, 8192), "--served-model-name", "tiny", "--kv-cache-memory-bytes", str(32 << 20)]
    cluster = Cluster(folder, flags)
    try:
        cluster.nodes = [cluster.start(role, flags) for role in ("prefill", "decode", "decode", "decode")]
        listed = [f"--{node.role}={node.url}" for node in cluster.nodes]
        # What would come later than this is refused, and asked again. So a fast machine has all of its prefill node's
        # time taken, a slow one has a backlog of seconds, and a very slow one has most requests refused.
        aims = ["--balance", "--ttft-target-ms", "6000", "--tpot-target-ms", "60000", "--log-format", "json"]
        others = ["--no-conditional-disaggregation", "--least-decode", "2", "--workers", "2"]
        cluster.router = cluster.start("router", [*listed, *aims, *others])
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
    seen = json.loads(told.content)["balance"]
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
            if answer.status == 429:
                await asyncio.sleep(0.2)
                continue
            assert answer.status == 200, text
        assert text.endswith("data: [DONE]\n\n"), text[-300:]
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted[which]
        done += 1
    return done


async def test_prompts_that_one_node_cannot_compute_get_another_one(cluster: Cluster) -> None:
    def answer(at: int) -> str:
        said = httpx2.post(f"{cluster.url}/v1/completions", json=body(at, "undisturbed"), timeout=120)
        return str(said.json()["choices"][0]["text"])

    wanted = [await asyncio.to_thread(answer, at) for at in range(PROMPTS)]
    stop = asyncio.Event()

    def changed() -> Any:
        assert not any(each.done() for each in streams), [each for each in streams if each.done()]
        done = [change for change in picture(cluster)["changes"] if change["outcome"].startswith("done")]
        return done[0] if done else None

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        streams = [asyncio.create_task(ask_for_ever(session, cluster.url, at, wanted, stop)) for at in range(STREAMS)]
        try:
            change = await asyncio.to_thread(wait_until, changed, CHANGES_WITHIN_S, "a node has changed its role", 0.5)
            before = [node.metric("kvrelay_leases_released_total") for node in cluster.nodes]
            flipped = next(at for at, node in enumerate(cluster.nodes) if node.url == change["where"])

            def serves() -> bool:
                return cluster.nodes[flipped].metric("kvrelay_leases_released_total") > before[flipped] + 2

            await asyncio.to_thread(wait_until, serves, 60, "prompts are computed on it", 0.5)
        finally:
            stop.set()
        assert sum(await asyncio.gather(*streams)) > 4
    assert change["role"] == "prefill"
    assert change["where"] == max(node.url for node in cluster.of("decode"))
    roles = [json.loads(httpx2.get(f"{node.url}/health", timeout=5).content)["role"] for node in cluster.nodes]
    assert sorted(roles) == ["decode", "decode", "prefill", "prefill"]
    # With two decode nodes left, which is the least, it stays so.
    wait_until(lambda: picture(cluster)["roles"]["prefill"]["nodes"] == 2, 30, "the balance sees both")
    text = httpx2.get(f"{cluster.url}/metrics", timeout=10).text
    changes = r'kvrelay_router_role_changes_total\{model_name="tiny",outcome="(\w+)",role="prefill"\} (\S+)'
    assert re.findall(changes, text) == [("done", "1.0")]
    assert cluster.router is not None
    lines = [json.loads(line) for line in cluster.router.log.read_text().splitlines() if '"roles: ' in line]
    assert [line["where"] for line in lines] == [change["where"]] * 2
    assert (lines[0]["prefill_nodes"], lines[0]["decode_nodes"]) == (1, 3)
    assert lines[0]["prefill_use"] > lines[0]["decode_use"]
    assert [line for line in cluster.router.log.read_text().splitlines() if "leg broke" in line] == []
    cluster.all_blocks_free(within_s=10)
