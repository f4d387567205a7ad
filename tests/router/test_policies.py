"""Each policy's choice of a node."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.nodes.rates import NodeRates
from router.policies.bound import most_depth
from router.policies.by_name import POLICIES
from router.policies.candidates import ALL, looked_at
from router.policies.cost import cost, decode_ms, prefill_ms
from router.policies.least_queue import least_queue
from router.policies.policy import TOKENS_PER_REQUEST, Ask, NodeView
from router.policies.power_of_two import power_of_two
from router.policies.prefix import prefix
from router.policies.round_robin import round_robin
from router.policies.session import session
from wire.config import Role
from wire.router_config import POLICY_NAMES

ASK = Ask(Role.PREFILL)

views = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20_000)), min_size=1, max_size=50).map(
    lambda pairs: [NodeView(f"http://n{at}", requests, tokens) for at, (requests, tokens) in enumerate(pairs)]
)
cached = st.dictionaries(st.integers(0, 60).map(lambda at: f"http://n{at}"), st.integers(1, 5_000), max_size=40)
asks = st.builds(
    Ask,
    st.sampled_from([Role.PREFILL, Role.DECODE]),
    tokens=st.integers(0, 5_000),
    kv_tokens=st.integers(0, 5_000),
    output_tokens=st.integers(0, 500),
    session=st.text(max_size=3),
    cached=cached,
)
few_examples = settings(max_examples=40)


def placed(policy: str, nodes: int, requests: int) -> list[int]:
    """How many of these requests, none of which ends, each node gets."""
    return [view.requests for view in spread(policy, nodes, requests, ASK)]


def spread(policy: str, nodes: int, requests: int, ask: Ask) -> list[NodeView]:
    """The nodes when they have been given so many requests."""
    rng, views = random.Random(3), [NodeView(f"http://n{at}") for at in range(nodes)]
    for turn in range(requests):
        chosen = POLICIES[policy](ask, views, rng)
        chosen.requests += 1
        chosen.tokens += ask.uncached(chosen)
        chosen.turn = turn + 1
    return views


def test_the_names_that_a_config_may_have_are_those_of_the_policies() -> None:
    assert tuple(sorted(POLICIES)) == POLICY_NAMES


@pytest.mark.parametrize("name", POLICY_NAMES)
@few_examples
@given(nodes=views, ask=asks, seed=st.integers())
def test_a_given_node_is_chosen_and_equal_seeds_choose_equally(
    name: str, nodes: list[NodeView], ask: Ask, seed: int
) -> None:
    chosen = POLICIES[name](ask, nodes, random.Random(seed))
    assert any(chosen is node for node in nodes)
    assert POLICIES[name](ask, nodes, random.Random(seed)) is chosen


@pytest.mark.parametrize("name", ["cost", "least_queue", "round_robin", "prefix", "session"])
@given(nodes=st.integers(1, 6), requests=st.integers(1, 40))
@few_examples
def test_requests_placed_one_after_the_other_spread_evenly(name: str, nodes: int, requests: int) -> None:
    counts = placed(name, nodes, requests)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("name", "most"), [("random", 1_150), ("power_of_two", 1_004)])
def test_random_ones_spread_evenly_on_average(name: str, most: int) -> None:
    assert max(placed(name, 10, 10_000)) <= most


@given(views, st.integers())
@few_examples
def test_the_least_queue_has_the_least_depth(nodes: list[NodeView], seed: int) -> None:
    chosen = least_queue(ASK, nodes, random.Random(seed))
    assert all(chosen.depth <= node.depth for node in nodes)


@pytest.mark.parametrize("policy", [least_queue, cost, prefix, session])
def test_ties_are_broken_at_random(policy: object) -> None:
    rng, nodes = random.Random(1), [NodeView("a", 1, 0), NodeView("b", 1, 0), NodeView("c", 2, 0)]
    assert {policy(ASK, nodes, rng).url for _ in range(50)} == {"a", "b"}


def test_a_long_uncomputed_prompt_outweighs_several_short_requests() -> None:
    long, short = NodeView("long", 1, 10 * TOKENS_PER_REQUEST), NodeView("short", 5, 0)
    assert least_queue(ASK, [long, short], random.Random(1)) is short


def test_round_robin_takes_new_nodes_up_and_forgets_those_that_left() -> None:
    nodes, chosen, rng = [NodeView(name) for name in "abc"], [], random.Random(1)
    for turn in range(1, 10):
        if turn == 4:
            nodes.append(NodeView("d"))
        if turn == 7:
            del nodes[0]
        node = round_robin(ASK, nodes, rng)
        node.turn = turn
        chosen.append(node.url)
    assert "".join(chosen) == "abcdabcdb"


@given(views, st.integers())
@few_examples
def test_power_of_two_never_takes_the_deepest_of_all(nodes: list[NodeView], seed: int) -> None:
    chosen = power_of_two(ASK, nodes, random.Random(seed))
    assert len(nodes) == 1 or chosen.depth <= sorted(node.depth for node in nodes)[-2]


# --- prefix ----------------------------------------------------------------------------------------------------------


def test_the_longest_prefix_wins_within_the_bound() -> None:
    rng, nodes = random.Random(1), [NodeView("a", 1), NodeView("b", 2), NodeView("c", 0)]
    assert prefix(Ask(Role.PREFILL, tokens=900, cached={"a": 300, "b": 800}), nodes, rng).url == "b"
    nodes[1].requests = 20
    assert prefix(Ask(Role.PREFILL, tokens=900, cached={"a": 300, "b": 800}), nodes, rng).url == "a"


def test_an_overloaded_node_elsewhere_turns_no_affinity_off() -> None:
    nodes = [NodeView(f"http://n{at}", 2) for at in range(8)]
    ask = Ask(Role.PREFILL, tokens=900, cached={"http://n3": 800})
    nodes[7].requests = 1_000
    assert prefix(ask, nodes, random.Random(1)).url == "http://n3"


@pytest.mark.parametrize("name", ["prefix", "session", "cost"])
@pytest.mark.parametrize("nodes", [2, 5])
def test_affinity_overloads_no_node_while_others_idle(name: str, nodes: int) -> None:
    """All requests have one prefix and one session, and it is cached on one node."""
    ask = Ask(Role.PREFILL, tokens=1_000, session="s", cached={"http://n0": 900})
    views = spread(name, nodes, 200, ask)
    if name == "cost":  # what the next one would wait is the same everywhere
        waits_ms = [prefill_ms(ask, view) for view in views]
        assert max(waits_ms) <= 1.05 * min(waits_ms) + 2 * NodeRates().prefill_ms(ask.tokens)
        return
    depths = [view.depth for view in views]
    assert max(depths) <= most_depth(views) + 4
    assert name == "session" or min(depths) >= sum(depths) / nodes / 2


@given(views)
@few_examples
def test_some_node_is_always_within_the_bound(nodes: list[NodeView]) -> None:
    assert min(node.depth for node in nodes) < most_depth(nodes)


# --- session ---------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=8), st.integers(2, 20), st.data())
@few_examples
def test_a_session_moves_only_if_its_node_leaves_or_a_new_one_takes_it(
    name: str, count: int, data: st.DataObject
) -> None:
    nodes = [NodeView(f"http://n{at}") for at in range(count)]
    ask, rng = Ask(Role.DECODE, session=name), random.Random(1)
    home = session(ask, nodes, rng)
    gone = data.draw(st.sampled_from(nodes))
    if gone is not home:
        assert session(ask, [node for node in nodes if node is not gone], rng) is home
    new = NodeView("http://new")
    assert session(ask, [*nodes, new], rng) in (home, new)


def test_sessions_spread_over_all_nodes_and_few_move_when_one_joins() -> None:
    nodes, rng = [NodeView(f"http://n{at}") for at in range(11)], random.Random(1)
    asks = [Ask(Role.DECODE, session=f"user {at}") for at in range(2_000)]
    homes = [session(ask, nodes[:10], rng).url for ask in asks]
    assert all(140 < count < 260 for count in Counter(homes).values())
    moved = sum(session(ask, nodes, rng).url != home for ask, home in zip(asks, homes, strict=True))
    assert 120 < moved < 250


def test_a_session_leaves_a_node_with_too_deep_a_queue_until_that_is_over() -> None:
    nodes, ask, rng = [NodeView(f"http://n{at}") for at in range(4)], Ask(Role.DECODE, session="s"), random.Random(1)
    home = session(ask, nodes, rng)
    home.requests = 50
    assert session(ask, nodes, rng) is not home
    home.requests = 0
    assert session(ask, nodes, rng) is home


# --- cost ------------------------------------------------------------------------------------------------------------


def slower(factor: float) -> NodeRates:
    rates, usual = NodeRates(), NodeRates()
    for _ in range(40):
        for tokens in (100, 1_000, 4_000):
            rates.prefilled(tokens, usual.prefill_ms(tokens) * factor)
        for running in (1, 8, 64):
            rates.stepped(running, usual.step_ms(running) * factor)
    return rates


@given(st.integers(0, 5_000), st.integers(0, 5_000), st.integers(0, 100), st.integers(0, 20_000), st.integers(1, 3_000))
@few_examples
def test_cost_never_falls_with_load_and_uncached_tokens(
    tokens: int, kv_tokens: int, requests: int, queued: int, more: int
) -> None:
    rates = slower(2)

    def both(tokens: int = tokens, requests: int = requests, queued: int = queued, room: float = 1e9) -> list[float]:
        node = NodeView("n", requests, queued, kv_room=room, context_tokens=1_000, rates=rates)
        prefill = prefill_ms(Ask(Role.PREFILL, tokens=tokens), node)
        return [prefill, decode_ms(Ask(Role.DECODE, tokens=tokens, kv_tokens=kv_tokens + 10_000), node)]

    for dearer in (
        both(tokens=tokens + more),
        both(requests=requests + more),
        both(queued=queued + more),
        both(room=9),
    ):
        assert all(math.isfinite(ms) and ms >= known for ms, known in zip(dearer, both(), strict=True))


def test_cached_tokens_are_weighed_against_the_queue_in_milliseconds() -> None:
    here, there, rng = NodeView("here"), NodeView("there"), random.Random(1)
    ask = Ask(Role.PREFILL, tokens=4_000, cached={"here": 3_500})
    assert cost(ask, [here, there], rng) is here
    here.requests, here.tokens = 3, 2_000
    assert cost(ask, [here, there], rng) is here
    here.tokens = 12_000
    assert cost(ask, [here, there], rng) is there


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_slow_node_gets_less(role: Role) -> None:
    nodes = [NodeView("slow", rates=slower(3)), NodeView("fast", rates=slower(1))]
    rng, ask = random.Random(1), Ask(role, tokens=1_000 if role is Role.PREFILL else 0, kv_tokens=1_000)
    for _ in range(60):
        chosen = cost(ask, nodes, rng)
        chosen.requests += 1
        chosen.tokens += ask.tokens
    assert nodes[0].requests < nodes[1].requests / 2


def test_a_decode_node_without_room_waits_for_it() -> None:
    full, busy = NodeView("full", 4, kv_room=100, context_tokens=8_000), NodeView("busy", 10, kv_room=9_000)
    assert cost(Ask(Role.DECODE, kv_tokens=2_000), [full, busy], random.Random(1)) is busy
    assert cost(Ask(Role.DECODE, kv_tokens=10, output_tokens=20), [full, busy], random.Random(1)) is full


def test_kv_comes_from_the_faster_pair() -> None:
    near, far = NodeView("near"), NodeView("far")
    for node, ms in ((near, 2.0), (far, 400.0)):
        for _ in range(10):
            node.rates.fetched("p", 4_000, ms)
    assert cost(Ask(Role.DECODE, kv_tokens=4_000, peer="p"), [far, near], random.Random(1)) is near


# --- many nodes ------------------------------------------------------------------------------------------------------


def test_of_very_many_nodes_a_few_are_looked_at_and_the_best_holders_among_them() -> None:
    nodes, rng = [NodeView(f"http://n{at}") for at in range(1_000)], random.Random(1)
    everywhere = {node.url: 512 for node in nodes}
    ask = Ask(Role.PREFILL, tokens=4_096, cached=everywhere | {"http://n7": 4_000, "http://n8": 3_000})
    few = looked_at(ask, nodes, rng)
    assert len(few) == len(set(map(id, few))) <= 16
    assert {"http://n7", "http://n8"} <= {node.url for node in few}
    assert cost(ask, nodes, rng).url == "http://n7"
    assert looked_at(ask, nodes[:ALL], rng) == nodes[:ALL]


def test_each_added_request_makes_a_decode_node_dearer() -> None:
    costs = [decode_ms(Ask(Role.DECODE, kv_tokens=100), NodeView("n", requests)) for requests in range(100)]
    assert all(one < next_one for one, next_one in pairwise(costs))
