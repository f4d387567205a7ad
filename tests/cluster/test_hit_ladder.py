"""The hit ladder of real clusters: each cause is brought about and named, and the rungs add up."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import pytest
from real_cluster import (
    SHORT_LEASE,
    Cluster,
    Process,
    cached_of,
    children,
    complete,
    running,
    tiny_model,
    wait_until,
)

from kvrelay.wire.ladder import RUNGS

pytestmark = pytest.mark.cluster

BLOCK = 16
TOKENS = 160
FOUND = (TOKENS - 1) // BLOCK * BLOCK
"""What there may be of a prompt: its last token is computed."""
FILL = 14
"""Prompts that fill a pool of 127 blocks."""


def ids(name: int, count: int = TOKENS) -> list[int]:
    return [2 + (name * 7919 + at * at * (name + 3)) % 300 for at in range(count)]


def rungs(cluster: Cluster, prompt: list[int], **fields: Any) -> dict[str, int]:
    """Ask the router; return the rungs that are not empty, once it knows what nodes hold now."""
    answer = complete(cluster.url, prompt, include_metrics=True, **fields)
    found: dict[str, int] = answer["kvrelay"]["prompt"]
    assert list(found) == list(RUNGS)
    assert sum(found.values()) == answer["usage"]["prompt_tokens"] == len(prompt)
    assert sum(found[rung] for rung in RUNGS[:4]) == cached_of(answer)
    router, seen = cluster.router, list[float]()
    assert router is not None

    def steady() -> bool:
        nodes = httpx2.get(f"{cluster.url}/health", timeout=5).json()["nodes"]
        seen.append(router.metric("kvrelay_router_prefix_blocks"))
        same = len(seen) >= 5 and len(set(seen[-5:])) == 1
        return same and all(node["kv_events"] for node in nodes)

    wait_until(steady, 20, "events of all nodes")
    return {rung: count for rung, count in found.items() if count}


@contextmanager
def frozen(*nodes: Process) -> Iterator[None]:
    """Let the engines of nodes stand still."""
    engines = [pid for node in nodes for pid in children(node.popen.pid, b"engine_process")]
    assert len(engines) == len(nodes)
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in engines:
            os.kill(pid, signal.SIGCONT)


def test_what_is_elsewhere_was_evicted_or_makes_room_in_between_is_named(tmp_path) -> None:
    flags = [*tiny_model(tmp_path, kv_mib=1), "--kv-pull", "never"]
    policy = ["--prefill-policy", "round_robin"]
    with running(tmp_path, prefill=2, decode=1, flags=flags, router_flags=policy) as cluster:
        prompt, nodes = ids(1), cluster.of("prefill")
        assert rungs(cluster, prompt) == {"new": TOKENS}
        assert rungs(cluster, prompt) == {"placement": FOUND, "new": BLOCK}
        assert rungs(cluster, prompt) == {"gpu": FOUND, "new": BLOCK}
        for at in range(2 * FILL):
            complete(cluster.url, ids(10 + at))
        rungs(cluster, ids(2))
        rungs(cluster, ids(2))
        assert rungs(cluster, prompt) == {"capacity": FOUND, "new": BLOCK}
        rungs(cluster, prompt)
        found: list[dict[str, int]] = []
        asked = [
            threading.Thread(
                target=complete,
                args=(node.url, ids(100 + at)),
                kwargs={"max_tokens": 1, "priority": -1},
            )
            for node in nodes
            for at in range(FILL)
        ]
        late = threading.Thread(target=lambda: found.append(rungs(cluster, prompt)))
        with frozen(*nodes):
            for each in asked:
                each.start()
            wait_until(lambda: all(_requests(node) == FILL for node in nodes), 20, "all wait")
            late.start()
            wait_until(lambda: any(_requests(node) > FILL for node in nodes), 20, "it waits, too")
        for each in [*asked, late]:
            each.join(60)
        assert found == [{"evicted": FOUND, "new": BLOCK}]
        text = dict.fromkeys(("gpu", "placement", "capacity", "evicted"), FOUND)
        for rung, least in text.items():
            assert _counted(cluster, rung) >= least
        assert _counted(cluster, "stale") == _counted(cluster, "failed") == 0


def test_what_another_node_has_is_found_there_or_its_read_fails(tmp_path) -> None:
    flags = [*tiny_model(tmp_path, max_position_embeddings=2048, kv_mib=4), *SHORT_LEASE]
    flags += ["--kv-pull", "always", "--transfer-deadline-s", "2"]
    with running(tmp_path, prefill=1, decode=1, flags=flags) as cluster:
        (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
        assert rungs(cluster, ids(1)) == {"new": TOKENS}
        whole = {}
        for name in (1, 2):
            answer = complete(cluster.url, ids(name), max_tokens=80, return_token_ids=True)
            whole[name] = [*ids(name), *answer["choices"][0]["token_ids"], *ids(name + 1, 20)]
        rungs(cluster, ids(3))
        rest = (TOKENS + 79) // BLOCK * BLOCK - TOKENS
        new = len(whole[1]) - TOKENS - rest
        assert rungs(cluster, whole[1]) == {"gpu": TOKENS, "peer": rest, "new": new}
        found: list[dict[str, int]] = []
        late = threading.Thread(target=lambda: found.append(rungs(cluster, whole[2])))
        failed = "kvrelay_pulls_failed_total"
        with frozen(decode):
            late.start()
            wait_until(lambda: prefill.metric(failed) > 0, 30, "its ask was not answered in time")
        late.join(60)
        assert found == [{"gpu": TOKENS, "failed": rest, "new": new}]
        assert prefill.metric("kvrelay_prompt_tokens_total") > 0


def test_what_a_holder_lost_before_the_router_heard_of_it_is_stale(tmp_path) -> None:
    flags = [*tiny_model(tmp_path, max_position_embeddings=2048, kv_mib=4), "--kv-pull", "always"]
    cluster = Cluster(tmp_path, flags)
    prefill, decode = cluster.nodes = [cluster.start(role, flags) for role in ("prefill", "decode")]
    try:
        cluster.wait_ready(prefill, decode)
        with _link(decode.port) as (url, passing):
            peers = [f"--prefill={prefill.url}", f"--decode={url}"]
            patient = ["--strict-roles", "--health-deadline-s", "60"]
            cluster.router = cluster.start("router", [*peers, *patient])
            cluster.wait_ready(cluster.router)
            cluster.wait_up()
            answer = complete(cluster.url, ids(1), max_tokens=80, return_token_ids=True)
            whole = [*ids(1), *answer["choices"][0]["token_ids"], *ids(2, 20)]
            rungs(cluster, ids(3))
            passing.clear()  # what the decode node tells the router is late
            try:
                assert httpx2.post(f"{decode.url}/reset_prefix_cache").status_code == 200
                answer = complete(cluster.url, whole, max_tokens=1, include_metrics=True)
            finally:
                passing.set()
            found = {rung: count for rung, count in answer["kvrelay"]["prompt"].items() if count}
            rest = (TOKENS + 79) // BLOCK * BLOCK - TOKENS
            assert found == {"gpu": TOKENS, "stale": rest, "new": len(whole) - TOKENS - rest}
            assert _counted(cluster, "stale") == rest
    finally:
        cluster.stop()


@contextmanager
def _link(port: int) -> Iterator[tuple[str, threading.Event]]:
    """Lead connections to a port; what comes back waits until the event is set."""
    passing, always = threading.Event(), threading.Event()
    for event in (passing, always):
        event.set()

    def pump(source: socket.socket, target: socket.socket, may: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                may.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as node:
                there = threading.Thread(target=pump, args=(self.request, node, always))
                there.start()
                pump(node, self.request, passing)
                there.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", passing
        server.shutdown()


def _requests(node: Process) -> int:
    report = node.health()
    return 0 if report is None else int(report["requests"])


def _counted(cluster: Cluster, rung: str) -> float:
    assert cluster.router is not None
    return cluster.router.metric(f'kvrelay_router_prompt_tokens_total{{rung="{rung}"}}')
