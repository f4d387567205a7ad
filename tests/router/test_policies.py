"""Each policy's choice of a node."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.placement import PlacementRequest
from kvrelay.router.policies import (
    POLICIES,
    prefix,
    round_robin,
    session,
)
from kvrelay.wire.router_config import POLICY_NAMES, PRICE

ASK = PlacementRequest(1, 1.0, 1.0, 1.0)
TOKENS_PER_REQUEST = 512


@dataclass(eq=False)
class View:
    """A node as a policy sees it."""

    url: str
    requests: int = 0
    tokens: int = 0
    turn: int = 0

    @property
    def state(self) -> View:
        return self

    @property
    def depth(self) -> float:
        return self.requests + self.tokens / TOKENS_PER_REQUEST


views = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20_000)), min_size=1, max_size=50
).map(
    lambda pairs: [
        View(f"http://n{at}", requests, tokens) for at, (requests, tokens) in enumerate(pairs)
    ]
)
cached = st.dictionaries(
    st.integers(0, 60).map(lambda at: f"http://n{at}"), st.integers(1, 5_000), max_size=40
)
asks = st.builds(
    partial(PlacementRequest, 1, 1.0, 1.0, 1.0),
    session=st.text(max_size=3),
    cached=cached,
)
few_examples = settings(max_examples=40)


def asked(**fields: object) -> PlacementRequest:
    return replace(ASK, **fields)


def placed(policy: str, nodes: int, requests: int) -> list[int]:
    """How many of these requests, none of which ends, each node gets."""
    return [view.requests for view in spread(policy, nodes, requests, ASK)]


def spread(policy: str, nodes: int, requests: int, ask: PlacementRequest) -> list[View]:
    """The nodes when they have been given so many requests."""
    rng, views = random.Random(3), [View(f"http://n{at}") for at in range(nodes)]
    for turn in range(requests):
        chosen = POLICIES[policy](ask, views, rng)
        chosen.requests += 1
        chosen.tokens += 0 if chosen.url in ask.cached or not ask.cached else 1_000
        chosen.turn = turn + 1
    return views


def test_the_names_that_a_config_may_have_are_those_of_the_policies() -> None:
    assert tuple(sorted({*POLICIES, PRICE})) == POLICY_NAMES


@pytest.mark.parametrize("name", POLICIES)
@few_examples
@given(nodes=views, ask=asks, seed=st.integers())
def test_a_given_node_is_chosen_and_equal_seeds_choose_equally(
    name: str, nodes: list[View], ask: PlacementRequest, seed: int
) -> None:
    chosen = POLICIES[name](ask, nodes, random.Random(seed))
    assert any(chosen is node for node in nodes)
    assert POLICIES[name](ask, nodes, random.Random(seed)) is chosen


def test_round_robin_takes_new_nodes_up_and_forgets_those_that_left() -> None:
    nodes, chosen, rng = [View(name) for name in "abc"], [], random.Random(1)
    for turn in range(1, 10):
        if turn == 4:
            nodes.append(View("d"))
        if turn == 7:
            del nodes[0]
        node = round_robin(ASK, nodes, rng)
        node.turn = turn
        chosen.append(node.url)
    assert "".join(chosen) == "abcdabcdb"


# --- prefix
# ----------------------------------------------------------------------------------------------------------


def test_the_longest_prefix_wins_within_the_bound() -> None:
    rng, nodes = random.Random(1), [View("a", 1), View("b", 2), View("c", 0)]
    assert prefix(asked(cached={"a": 300, "b": 800}), nodes, rng).url == "b"
    nodes[1].requests = 20
    assert prefix(asked(cached={"a": 300, "b": 800}), nodes, rng).url == "a"


@pytest.mark.parametrize("name", ["prefix", "session"])
@pytest.mark.parametrize("nodes", [2, 5])
def test_affinity_overloads_no_node_while_others_idle(name: str, nodes: int) -> None:
    """All requests have one prefix and one session, and it is cached on one node."""
    ask = asked(session="s", cached={"http://n0": 900})
    views = spread(name, nodes, 200, ask)
    depths = [view.state.depth for view in views]
    assert max(depths) <= 1.25 * sum(depths) / nodes + 2 + 4  # the bound, and the last request
    assert name == "session" or min(depths) >= sum(depths) / nodes / 2


# --- session
# ---------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=8), st.integers(2, 20), st.data())
@few_examples
def test_a_session_moves_only_if_its_node_leaves_or_a_new_one_takes_it(
    name: str, count: int, data: st.DataObject
) -> None:
    nodes = [View(f"http://n{at}") for at in range(count)]
    ask, rng = asked(session=name), random.Random(1)
    home = session(ask, nodes, rng)
    gone = data.draw(st.sampled_from(nodes))
    if gone is not home:
        assert session(ask, [node for node in nodes if node is not gone], rng) is home
    new = View("http://new")
    assert session(ask, [*nodes, new], rng) in (home, new)


def test_a_session_leaves_a_node_with_too_deep_a_queue_until_that_is_over() -> None:
    nodes, ask, rng = (
        [View(f"http://n{at}") for at in range(4)],
        asked(session="s"),
        random.Random(1),
    )
    home = session(ask, nodes, rng)
    home.requests = 50
    assert session(ask, nodes, rng) is not home
    home.requests = 0
    assert session(ask, nodes, rng) is home
