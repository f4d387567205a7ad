"""Where real nodes' KV is looked for: the router knows what lies below their pools."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from real_cluster import (
    DRAWN,
    Cluster,
    Process,
    attentive_model,
    cached_of,
    children,
    complete,
    counted,
    ids,
    wait_told,
    wait_until,
)

pytestmark = pytest.mark.cluster

BLOCK, PROMPT = 16, 1800
STORED = "kvrelay_tier_host_stored_blocks_total"


class Sessions:
    """Two prefill nodes, of which one keeps KV in host memory, behind a router."""

    def __init__(self, cluster: Cluster, flags: list[str]) -> None:
        self.cluster, self.histories = cluster, dict[int, list[int]]()
        checks = ["--kv-checksums=0.001", "--kv-pull=always"]
        self.warm = cluster.start("prefill", [*flags, *checks, "--kv-host-memory=16MiB"])
        reader = cluster.start("decode", [*flags, *checks])
        self.nodes = [self.warm, cluster.start("prefill", [*flags, "--kv-pull=never"]), reader]
        cluster.nodes += self.nodes
        cluster.wait_ready(*self.nodes)
        peers = [f"--{node.role}={node.url}" for node in self.nodes]
        cluster.router = cluster.start("router", [*peers, "--strict-roles"])
        cluster.wait_ready(cluster.router)
        cluster.wait_up()

    def turn(self, session: int) -> tuple[str, Any]:
        """Ask for the next answer; return how it was placed, and the answer."""
        history = self.histories.setdefault(session, ids(session, PROMPT))
        placed, answer = self.ask(history)
        history += [*answer["choices"][0]["token_ids"], *ids(session + 1, 20)]
        return placed, answer

    def ask(self, prompt: list[int]) -> tuple[str, Any]:
        answer = complete(self.cluster.url, prompt, return_token_ids=True, **DRAWN)
        line = re.compile(rf"id={answer['id'].removeprefix('cmpl-')} .*placed='([^']*)'")
        log = self.cluster.router.log  # type: ignore[union-attr]
        wait_until(lambda: line.search(log.read_text()), "its log line")
        return line.search(log.read_text())[1], answer  # type: ignore[index]

    def tell_other(self, order: str) -> None:
        """Have the router drain the node that keeps nothing, or take it back."""
        url, body = f"{self.cluster.url}/admin/{order}", {"url": self.nodes[1].url}
        told = httpx2.post(url, headers=self.cluster.operator, json=body, timeout=60)
        assert told.status_code == 200, told.text

    def knows_again(self) -> bool:
        """Return whether the new engine and the router, which has met it, know all blocks."""
        url, headers = f"{self.cluster.url}/admin/nodes", self.cluster.operator
        told = httpx2.get(url, headers=headers, timeout=60).json()["nodes"]
        met = self.warm.engines_told() == 2 and self.warm.health()["generation"] in [
            node["generation"] for node in told
        ]
        router, host = self.cluster.router, self.warm.metric("kvrelay_tier_host_blocks")
        return met and router.metric("kvrelay_router_prefix_blocks") >= host + 400  # type: ignore[union-attr]

    def fill_pools(self, name: int, *nodes: Process) -> None:
        for node in nodes or self.nodes:
            for at in range(5):
                complete(node.url, ids(name + at, PROMPT), max_tokens=1)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    folder = tmp_path_factory.mktemp("prices")
    # 255 blocks: two sessions. Computing one costs more than the noise of a busy machine.
    flags = attentive_model(folder, 2048, kv_mib=2)
    cluster = Cluster(folder, flags)
    try:
        yield Sessions(cluster, flags)
    finally:
        cluster.stop()


def test_a_turn_is_placed_where_the_host_memory_has_the_one_before(sessions: Sessions) -> None:
    warm = sessions.warm
    name = warm.url.rpartition("/")[2]
    mine = [1_000, 1_001]
    sessions.tell_other("drain")
    for at in mine:
        assert sessions.turn(at)[0].startswith(name)
    sessions.tell_other("undrain")
    sessions.cluster.wait_up()
    wait_until(lambda: warm.metric(STORED) >= 2 * (PROMPT // BLOCK), "all is stored")
    sessions.fill_pools(2_000)
    for at in mine:
        placed, answer = sessions.turn(at)
        assert re.match(rf"{name}/.* pulls from host", placed), placed
        assert cached_of(answer) == PROMPT // BLOCK * BLOCK
    # Another engine finds it still, and the router knows.
    sessions.fill_pools(3_000)
    (pid,) = children(warm.popen.pid, b"engine_process")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: warm.health() is None, "the node knows")
    wait_until(warm.health, "another engine")
    sessions.cluster.wait_up()
    wait_until(sessions.knows_again, "the router follows the new engine")
    for at in mine:
        placed, answer = sessions.turn(at)
        assert re.match(rf"{name}/.* pulls from host", placed), placed
        assert cached_of(answer) >= PROMPT // BLOCK * BLOCK
    counted([warm], "kvrelay_pulls_failed_total", 0)
    # Another node may take it from there.
    sessions.fill_pools(4_050)
    below, reader = warm.health()["kv"]["cache"], sessions.nodes[2]
    params = {"sources": [below | {"tokens": PROMPT}]}
    prompt = sessions.histories[mine[0]][:PROMPT]
    answer = complete(reader.url, prompt, max_tokens=1, kv_transfer_params=params)
    assert cached_of(answer) == (PROMPT - 1) // BLOCK * BLOCK


def test_a_reset_through_the_router_leaves_nothing_to_find_or_to_pull(sessions: Sessions) -> None:
    cluster, warm, reader = sessions.cluster, sessions.warm, sessions.nodes[2]
    router, before = cluster.router, warm.metric(STORED)
    assert router is not None
    sessions.tell_other("drain")
    sessions.turn(1_010)
    wait_until(lambda: warm.metric(STORED) >= before + PROMPT // BLOCK, "all is stored")
    sessions.fill_pools(5_030, warm, reader)
    sessions.turn(1_020)  # whose answer the decode node alone has
    wait_told(router)
    asked = list[tuple[list[int], list[int]]]()
    for at, source in ((1_010, "host"), (1_020, reader.url.rpartition("/")[2])):
        placed, answer = sessions.ask(sessions.histories[at])
        assert f" pulls from {source}" in placed
        asked.append((sessions.histories[at], answer["choices"][0]["token_ids"]))
    sessions.fill_pools(5_050, warm, reader)
    wait_told(router)
    url = f"{cluster.url}/reset_prefix_cache"
    reset = httpx2.post(url, headers=cluster.operator, timeout=60)
    assert reset.status_code == 200, reset.text
    counted([warm], "kvrelay_tier_host_blocks", 0)
    counted([router], "kvrelay_router_prefix_blocks", 0)
    for prompt, tokens in asked:
        placed, again = sessions.ask(prompt)
        assert "pulls from" not in placed
        assert (cached_of(again), again["choices"][0]["token_ids"]) == (0, tokens)
