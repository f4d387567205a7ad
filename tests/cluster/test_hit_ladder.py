"""The hit ladder of a real cluster: causes of lost hits are brought about and named.

What is found on another node, and what is not read from it, is in test_pulls.py.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_cluster import (
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
    flags = [*tiny_model(tmp_path, kv_mib=1), "--kv-pull", "never"]
    policy = ["--prefill-policy", "round_robin"]
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
            wait_until(lambda: all(_requests(node) == FILL for node in nodes), 20, "all wait")
            late.start()
            wait_until(lambda: any(_requests(node) > FILL for node in nodes), 20, "it waits, too")
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


def _requests(node: Process) -> int:
    report = node.health()
    return 0 if report is None else int(report["requests"])
