"""The hit ladder of a real cluster: causes of lost hits are brought about and named.

What is found on another node, and what is not read from it, is in test_pulls.py.
"""

from __future__ import annotations

import itertools
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from real_cluster import (
    Cluster,
    Process,
    complete,
    frozen,
    ids,
    rungs,
    running,
    tiny_model,
    wait_until,
)

pytestmark = pytest.mark.cluster

BLOCK, TOKENS = 16, 160
FOUND = (TOKENS - 1) // BLOCK * BLOCK
"""The most that is found of a prompt: its last token is computed."""
FILL = 14
"""Prompts that fill a pool of 127 blocks."""


def test_what_is_elsewhere_was_evicted_or_makes_room_in_between_is_named(tmp_path: Path) -> None:
    flags = [*tiny_model(tmp_path, kv_mib=1), "--kv-pull=never"]
    policy = ["--prefill-policy=round_robin"]
    with running(tmp_path, prefill=2, decode=1, flags=flags, router_flags=policy) as cluster:
        prompt, nodes, router = ids(1, TOKENS), cluster.of("prefill"), cluster.router
        assert router is not None
        assert rungs(cluster, prompt) == {"new": TOKENS}
        assert rungs(cluster, prompt) == {"placement": FOUND, "new": BLOCK}
        assert rungs(cluster, prompt) == {"gpu": FOUND, "new": BLOCK}
        for at in range(2 * FILL):
            complete(cluster.url, ids(10 + at, TOKENS))
        rungs(cluster, ids(2, TOKENS))
        rungs(cluster, ids(2, TOKENS))
        assert rungs(cluster, prompt) == {"capacity": FOUND, "new": BLOCK}
        rungs(cluster, prompt)
        found: list[dict[str, int]] = []
        fill = {"max_tokens": 1, "priority": -1}
        asked = {
            node.url: [
                threading.Thread(
                    target=complete, args=(node.url, ids(100 + at, TOKENS)), kwargs=fill
                )
                for at in range(FILL)
            ]
            for node in nodes
        }
        late = threading.Thread(target=lambda: found.append(rungs(cluster, prompt)))
        with ExitStack() as stack:
            held = {node.url: stack.enter_context(ExitStack()) for node in nodes}
            for node in nodes:
                held[node.url].enter_context(frozen(node))
            for each in itertools.chain(*asked.values()):
                each.start()
            wait_until(lambda: all(_requests(node) == FILL for node in nodes), "all wait")
            late.start()
            wait_until(lambda: any(_requests(node) > FILL for node in nodes), "it waits, too")
            # The history keeps who evicted a block last: the node that was chosen.
            for node in sorted(nodes, key=_requests):
                held[node.url].close()
                for each in asked[node.url]:
                    each.join(60)
        late.join(60)
        assert found == [{"evicted": FOUND, "new": BLOCK}]
        name = 'kvrelay_router_prompt_tokens_total{{rung="{}"}}'
        for rung in ("gpu", "placement", "capacity", "evicted"):
            assert router.metric(name.format(rung)) >= FOUND
        assert router.metric(name.format("stale")) == router.metric(name.format("failed")) == 0


def test_what_a_holder_lost_before_the_router_heard_of_it_is_stale(tmp_path: Path) -> None:
    flags = [*tiny_model(tmp_path, max_position_embeddings=2048, kv_mib=4), "--kv-pull=always"]
    cluster = Cluster(tmp_path, flags)
    prefill, decode = cluster.nodes = [cluster.start(role, flags) for role in ("prefill", "decode")]
    try:
        cluster.wait_ready(prefill, decode)
        with _link(decode.port) as (url, passing):
            peers = [f"--prefill={prefill.url}", f"--decode={url}"]
            patient = ["--strict-roles", "--health-deadline-s=60"]
            cluster.router = cluster.start("router", [*peers, *patient])
            cluster.wait_ready(cluster.router)
            cluster.wait_up()
            answer = complete(cluster.url, ids(1, TOKENS), max_tokens=80, return_token_ids=True)
            whole = [*ids(1, TOKENS), *answer["choices"][0]["token_ids"], *ids(2, 20)]
            rungs(cluster, ids(3, TOKENS))
            passing.clear()  # what the decode node tells the router is late
            try:
                assert (
                    httpx2.post(f"{decode.url}/reset_prefix_cache", timeout=60).status_code == 200
                )
                answer = complete(cluster.url, whole, max_tokens=1, include_metrics=True)
            finally:
                passing.set()
            found = {rung: count for rung, count in answer["kvrelay"]["prompt"].items() if count}
            rest = (TOKENS + 79) // BLOCK * BLOCK - TOKENS
            assert found == {"gpu": TOKENS, "stale": rest, "new": len(whole) - TOKENS - rest}
            assert cluster.router.metric('kvrelay_router_prompt_tokens_total{rung="stale"}') == rest
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
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", passing
        finally:
            server.shutdown()


def _requests(node: Process) -> int:
    report = node.health()
    return 0 if report is None else int(report["requests"])
