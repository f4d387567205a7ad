"""Each policy's choice of a node."""

import random

from hypothesis import given
from hypothesis import strategies as st

from router.policies.least_queue import least_queue
from router.policies.policy import TOKENS_PER_REQUEST, Ask, NodeView
from wire.config import Role

ASK = Ask(Role.PREFILL)

views = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20_000)), min_size=1, max_size=8).map(
    lambda pairs: [NodeView(f"http://n{at}", requests, tokens) for at, (requests, tokens) in enumerate(pairs)]
)


@given(views, st.integers())
def test_the_chosen_node_has_the_least_depth(nodes: list[NodeView], seed: int) -> None:
    chosen = least_queue(ASK, nodes, random.Random(seed))
    assert chosen in nodes
    assert all(chosen.depth <= node.depth for node in nodes)


@given(views, st.integers())
def test_equal_seeds_choose_equally(nodes: list[NodeView], seed: int) -> None:
    assert least_queue(ASK, nodes, random.Random(seed)) is least_queue(ASK, nodes, random.Random(seed))


@given(st.integers(1, 6), st.integers(1, 60))
def test_requests_placed_one_after_the_other_spread_evenly(nodes: int, requests: int) -> None:
    rng, placed = random.Random(3), [0] * nodes
    for _ in range(requests):
        chosen = least_queue(ASK, [NodeView(str(at), count, 0) for at, count in enumerate(placed)], rng)
        placed[int(chosen.url)] += 1
    assert max(placed) - min(placed) <= 1


def test_ties_are_broken_at_random() -> None:
    rng, nodes = random.Random(1), [NodeView("a", 1, 0), NodeView("b", 1, 0), NodeView("c", 2, 0)]
    assert {least_queue(ASK, nodes, rng).url for _ in range(50)} == {"a", "b"}


def test_a_long_uncomputed_prompt_outweighs_several_short_requests() -> None:
    long, short = NodeView("long", 1, 10 * TOKENS_PER_REQUEST), NodeView("short", 5, 0)
    assert least_queue(ASK, [long, short], random.Random(1)) is short
