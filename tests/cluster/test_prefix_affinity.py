"""Two prefill and two decode nodes: a prompt goes to where its beginning is, as long as it is
there.
"""

from __future__ import annotations

import re
import uuid

import httpx2
import pytest
from real_cluster import (
    Cluster,
    Process,
    ids,
    running,
    tiny_body,
    tiny_model,
    wait_told,
    wait_until,
)

pytestmark = pytest.mark.cluster

BLOCK = 16
SHARED = 500
# Of the estimate, which goes by text, against what the node finds: where a token ends in the text
# is not known.
NEARLY = 2 * BLOCK


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("affinity")
    flags = tiny_model(folder, max_position_embeddings=2048, kv_mib=1)
    flags += ["--kv-pull", "never"]  # the decode node has all prompts, too
    policies = ["--prefill-policy", "prefix", "--decode-policy", "prefix"]
    with running(folder, prefill=2, decode=2, flags=flags, router_flags=policies) as ours:
        yield ours


class Answer:
    """A request's tokens, what was cached of it, and where it was."""

    def __init__(
        self, cluster: Cluster, prompt: list[int], at: Process | None = None, max_tokens: int = 4
    ) -> None:
        name = uuid.uuid4().hex
        body = tiny_body(prompt, max_tokens=max_tokens, return_token_ids=True)
        url = cluster.url if at is None else at.url
        answer = httpx2.post(
            f"{url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        self.token_ids = answer.json()["choices"][0]["token_ids"]
        self.cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        if at is None:
            assert cluster.router is not None
            log = cluster.router.log
            line = wait_until(
                lambda: re.search(rf"id={name} .*", log.read_text()), 10, "the router's log line"
            )
            self.prefill, self.decode = (
                re.search(rf" {role}=(\S+)", line[0])[1] for role in ("prefill", "decode")
            )


def counted(router: Process) -> dict[str, float]:
    """Tokens of prompts so far, by rung."""
    text = httpx2.get(f"{router.url}/metrics", timeout=5).text
    found = re.findall(r'kvrelay_router_prompt_tokens_total{rung="(\w+)"} (\S+)', text)
    return {rung: float(tokens) for rung, tokens in found}


def test_a_prompt_goes_to_where_its_beginning_is(cluster: Cluster) -> None:
    blocks = SHARED // BLOCK
    first, other = Answer(cluster, ids(1, SHARED)), Answer(cluster, ids(2, SHARED))
    assert (first.cached, other.cached) == (0, 0)
    wait_told(cluster.router)
    before = counted(cluster.router)
    for at in range(3):
        for mine, name in ((first, 1), (other, 2)):
            again = Answer(cluster, [*ids(name, SHARED), *ids(10 + at, 30)])
            assert again.prefill == mine.prefill
            assert again.cached == blocks * BLOCK
    after = counted(cluster.router)
    assert after["gpu"] - before["gpu"] == 6 * blocks * BLOCK
    assert (after["stale"], after["evicted"]) == (0, 0)

    # A turn later the text holds what the decode node has generated, which no prefill node has
    # computed.
    turn = Answer(cluster, ids(3, SHARED), max_tokens=100)
    wait_told(cluster.router)
    for _ in range(3):
        assert (
            Answer(cluster, [*ids(3, SHARED), *turn.token_ids, *ids(4, 20)]).decode == turn.decode
        )


def test_what_a_node_has_evicted_it_is_not_chosen_for(cluster: Cluster) -> None:
    blocks = SHARED // BLOCK
    first = Answer(cluster, ids(20, SHARED))
    node = next(node for node in cluster.nodes if node.url == first.prefill)
    _, total = node.free_blocks()
    others = total // blocks + 1
    for at in range(others):
        Answer(cluster, ids(30 + at, SHARED), at=node)
    wait_told(cluster.router)
    then = counted(cluster.router)
    again = Answer(cluster, [*ids(20, SHARED), *ids(1, 30)])
    assert again.cached == 0
    more = {rung: count - then[rung] for rung, count in counted(cluster.router).items()}
    assert (more["gpu"], more["stale"], more["evicted"]) == (0, 0, 0)
    assert more["placement"] + more["capacity"] == blocks * BLOCK
