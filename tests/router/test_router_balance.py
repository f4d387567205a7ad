"""The choice of a node by queue depth."""

import random

from hypothesis import given
from hypothesis import strategies as st

from router.balance import TOKENS_PER_REQUEST, NodeView, choose

views = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20_000)), min_size=1, max_size=8).map(
    lambda pairs: [NodeView(f"http://n{at}", requests, tokens) for at, (requests, tokens) in enumerate(pairs)]
)


@given(views, st.integers())
def test_the_chosen_node_has_the_least_depth(nodes: list[NodeView], seed: int) -> None:
    chosen = choose(nodes, random.Random(seed))
    assert chosen in nodes
    assert all(chosen.depth <= node.depth for node in nodes)


@given(views, st.integers())
def test_equal_seeds_choose_equally(nodes: list[NodeView], seed: int) -> None:
    assert choose(nodes, random.Random(seed)) == choose(nodes, random.Random(seed))


@given(st.integers(1, 6), st.integers(1, 60))
def test_requests_placed_one_after_the_other_spread_evenly(nodes: int, requests: int) -> None:
    rng, placed = random.Random(3), [0] * nodes
    for _ in range(requests):
        chosen = choose([NodeView(str(at), count, 0) for at, count in enumerate(placed)], rng)
        assert chosen is not None
        placed[int(chosen.url)] += 1
    assert max(placed) - min(placed) <= 1


def test_ties_are_broken_at_random() -> None:
    rng, nodes = random.Random(1), [NodeView("a", 1, 0), NodeView("b", 1, 0), NodeView("c", 2, 0)]
    assert {choose(nodes, rng).url for _ in range(50)} == {"a", "b"}  # type: ignore[union-attr]


def test_a_long_uncomputed_prompt_outweighs_several_short_requests() -> None:
    long, short = NodeView("long", 1, 10 * TOKENS_PER_REQUEST), NodeView("short", 5, 0)
    assert choose([long, short], random.Random(1)) is short


def test_no_nodes_give_no_choice() -> None:
    assert choose([], random.Random(1)) is None
