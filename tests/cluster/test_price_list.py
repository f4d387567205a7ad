"""Where real nodes' KV is looked for: the router knows what lies below their pools."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import httpx2
import pytest
from real_cluster import (
    Cluster,
    cached_of,
    children,
    complete,
    counted,
    ids,
    tiny_model,
    wait_until,
)

pytestmark = pytest.mark.cluster

BLOCK, PROMPT = 16, 1800


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
        answer = complete(self.cluster.url, history, max_tokens=4, return_token_ids=True)
        history += [*answer["choices"][0]["token_ids"], *ids(session + 1, 20)]
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

    def fill_pools(self, name: int) -> None:
        for node in self.nodes:
            for at in range(5):
                complete(node.url, ids(name + at, PROMPT), max_tokens=1)


def test_a_turn_is_placed_where_the_host_memory_has_the_one_before(tmp_path) -> None:
    # 255 blocks: two sessions. Computing one costs more than the noise of a busy machine.
    flags = tiny_model(tmp_path, max_position_embeddings=2048, kv_mib=2)
    cluster = Cluster(tmp_path, flags)
    try:
        sessions = Sessions(cluster, flags)
        warm = sessions.warm
        name = warm.url.rpartition("/")[2]
        mine = [1_000, 1_001]
        sessions.tell_other("drain")
        for at in mine:
            assert sessions.turn(at)[0].startswith(name)
        sessions.tell_other("undrain")
        cluster.wait_up()
        stored = "kvrelay_tier_host_stored_blocks_total"
        wait_until(lambda: warm.metric(stored) >= 2 * (PROMPT // BLOCK), "all is stored")
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
        cluster.wait_up()
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
    finally:
        cluster.stop()
