"""Two prefill and two decode nodes: a prompt goes to where its beginning is, as long as it is
there.
"""

from __future__ import annotations

import pytest
from real_cluster import cached_of, complete, ids, rungs, running, tiny_model, wait_told

pytestmark = pytest.mark.cluster

SHARED = 496
REST = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("affinity")
    flags = tiny_model(folder, max_position_embeddings=2048, kv_mib=1)
    flags += ["--kv-pull=never"]  # the decode node has all prompts, too
    policies = ["--prefill-policy=prefix", "--decode-policy=prefix"]
    with running(folder, prefill=2, decode=2, flags=flags, router_flags=policies) as ours:
        yield ours


def test_a_prompt_goes_to_where_its_beginning_is(cluster):
    for name in (1, 2):
        assert rungs(cluster, ids(name, SHARED)) == {"new": SHARED}
    for at, name in enumerate((2, 1, 1, 1, 2)):  # in turn would be elsewhere
        again = [*ids(name, SHARED), *ids(10 + at, REST)]
        assert rungs(cluster, again) == {"gpu": SHARED, "new": REST}


def test_what_a_node_has_evicted_it_is_not_chosen_for(cluster):
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


def test_a_turn_is_decoded_where_the_answer_before_was(cluster):
    answer = complete(cluster.url, ids(3, SHARED), max_tokens=100, return_token_ids=True)
    turn = [*ids(3, SHARED), *answer["choices"][0]["token_ids"], *ids(4, 20)]
    for _ in range(3):
        wait_told(cluster.router)
        complete(cluster.url, turn)
    found = [cached_of(complete(node.url, turn, max_tokens=1)) for node in cluster.of("decode")]
    assert sorted(found) == [0, (len(turn) - 1) // 16 * 16]
