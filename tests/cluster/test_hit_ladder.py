"""The hit ladder of a real cluster: a prompt goes to where its beginning is, as long as it is there,
and causes of lost hits are brought about and named.

What is found on another node, and what is not read from it, is in test_pulls.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx2
import pytest
from real_cluster import (
    Cluster,
    Process,
    cached_of,
    complete,
    frozen,
    further_router,
    ids,
    rungs,
    running,
    tiny_model,
    wait_told,
    wait_until,
)

pytestmark = pytest.mark.cluster

SHARED, REST = 496, 30
BLOCK, TOKENS = 16, 160
FOUND = (TOKENS - 1) // BLOCK * BLOCK
"""The most that is found of a prompt: its last token is computed."""
FILL = 14
"""Prompts that fill a pool of 127 blocks."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ladder")
    flags = tiny_model(folder, max_position_embeddings=2048, kv_mib=1)
    flags += ["--kv-pull=never"]  # the decode node has all prompts, too
    policies = ["--prefill-policy=prefix", "--decode-policy=prefix"]
    with running(folder, prefill=2, decode=2, flags=flags, router_flags=policies) as ours:
        yield ours


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    """Give it to a test with nothing cached."""
    for node in nodes.nodes:
        assert httpx2.post(f"{node.url}/reset_prefix_cache", timeout=60).status_code == 200
    return nodes


def test_a_prompt_goes_to_where_its_beginning_is(cluster: Cluster) -> None:
    for name in (1, 2):
        assert rungs(cluster, ids(name, SHARED)) == {"new": SHARED}
    for at, name in enumerate((2, 1, 1, 1, 2)):  # in turn would be elsewhere
        again = [*ids(name, SHARED), *ids(10 + at, REST)]
        assert rungs(cluster, again) == {"gpu": SHARED, "new": REST}


def test_what_a_node_has_evicted_it_is_not_chosen_for(cluster: Cluster) -> None:
    rungs(cluster, ids(20, SHARED))
    _, total = cluster.nodes[0].free_blocks()

    def fill(nodes, name):
        for node in nodes:
            for at in range(total // (SHARED // 16) + 1):
                complete(node.url, ids(name + at, SHARED))
        wait_told(cluster.router)

    fill(cluster.of("prefill"), 30)
    found = rungs(cluster, [*ids(20, SHARED), *ids(1, REST)])
    assert found == {"placement": SHARED, "new": REST}  # a decode node has it
    fill(cluster.nodes, 40)
    found = rungs(cluster, [*ids(20, SHARED), *ids(2, REST)])
    assert found == {"capacity": SHARED, "new": REST}


def test_a_turn_is_decoded_where_the_answer_before_was(cluster: Cluster) -> None:
    answer = complete(cluster.url, ids(3, SHARED), max_tokens=100, return_token_ids=True)
    turn = [*ids(3, SHARED), *answer["choices"][0]["token_ids"], *ids(4, 20)]
    for _ in range(3):
        wait_told(cluster.router)
        complete(cluster.url, turn)
    found = [cached_of(complete(node.url, turn, max_tokens=1)) for node in cluster.of("decode")]
    assert sorted(found) == [0, (len(turn) - 1) // 16 * 16]


def test_what_is_elsewhere_was_evicted_or_makes_room_in_between_is_named(cluster: Cluster) -> None:
    nodes = cluster.of("prefill")
    cluster = replace(cluster, nodes=[*nodes, cluster.of("decode")[0]])
    with further_router(cluster, "--prefill-policy=round_robin") as router:
        cluster.router, prompt = router, ids(1, TOKENS)
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


def _requests(node: Process) -> int:
    report = node.health()
    return 0 if report is None else int(report["requests"])
