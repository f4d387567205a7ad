"""Node states, leases and loads, with times given by hand."""

import random

import pytest

from router.membership.members import NodeSpec, Source
from router.nodes.node import HealthReport, Node
from router.nodes.pool import LOST_AFTER_MISSES, Pool
from router.policies.policy import Ask
from wire.config import Role
from wire.errors import NoNode
from wire.outputs import Load


def report(role: str = "prefill", model: str = "m", generation: str = "g1", load: Load | None = None) -> HealthReport:
    return HealthReport(Role(role), model, generation=generation, load=load or Load())


@pytest.fixture
def pool() -> Pool:
    pool = Pool(["http://p0/", "http://p1"], ["http://d0"], random.Random(1))
    for node in pool.nodes:
        pool.report(node, report(node.role), started=0.0, now=0.1)
    return pool


def test_nodes_are_down_until_a_health_check_succeeds() -> None:
    pool = Pool(["http://p0"], ["http://d0"], random.Random(1))
    with pytest.raises(NoNode, match="no prefill node is up"):
        pool.require_ready()
    pool.report(pool.nodes[0], report(), 0.0, 0.1)
    with pytest.raises(NoNode, match="no decode node is up"):
        pool.require_ready()
    pool.report(pool.nodes[1], report("decode"), 0.0, 0.1)
    pool.require_ready()


def test_leases_spread_over_nodes_and_are_given_back(pool: Pool) -> None:
    with pool.lease(Ask(Role.PREFILL, tokens=10), ()) as first, pool.lease(Ask(Role.PREFILL, tokens=10), ()) as second:
        assert first.node is not second.node
    assert all(not node.leases for node in pool.nodes)


def test_a_lease_is_given_back_when_its_block_raises(pool: Pool) -> None:
    with pytest.raises(KeyError), pool.lease(Ask(Role.DECODE, tokens=0), ()) as lease:
        raise KeyError
    assert not lease.node.leases


def test_an_excluded_node_is_not_leased(pool: Pool) -> None:
    with pytest.raises(NoNode), pool.lease(Ask(Role.DECODE, tokens=0), pool.up(Role.DECODE)):
        pass


def test_reported_load_of_others_counts_and_our_own_is_not_counted_twice(pool: Pool) -> None:
    node = pool.nodes[0]
    with pool.lease(Ask(Role.PREFILL, tokens=100), [pool.nodes[1]]):
        for _ in range(100):
            node.note_load(Load(running=3, waiting=1, waiting_tokens=150))
        assert (node.requests, node.tokens) == (4, 150)
    assert (node.requests, node.tokens) == (3, 50)


def test_news_of_others_are_believed_in_part_until_they_are_usual(pool: Pool) -> None:
    """Routers that all believe that a node is idle run to it together."""
    node = pool.nodes[0]
    for _ in range(300):
        node.note_load(Load(running=10, waiting_tokens=1_000))
    assert (node.requests, node.tokens) == (10, 1_000)
    node.note_load(Load())
    assert 6 <= node.requests <= 9
    assert 600 <= node.tokens <= 900
    assert (node.certain_requests, node.certain_tokens) == (0, 0)  # nobody is refused for what is not there
    for _ in range(300):
        node.note_load(Load())
    assert (node.requests, node.tokens) == (0, 0) == (node.foreign_requests, node.foreign_tokens)


def test_more_than_usual_is_certain_only_as_far_as_it_is_believed(pool: Pool) -> None:
    """One report of a burst of others refuses nobody, either."""
    node = pool.nodes[0]
    with pool.lease(Ask(Role.PREFILL, tokens=100), [pool.nodes[1]]):
        for _ in range(300):
            node.note_load(Load(running=1, waiting_tokens=100))
        node.note_load(Load(running=101, waiting_tokens=100_100))
        assert (node.certain_requests, node.certain_tokens) == (node.requests, node.tokens)
        assert node.requests < 30


def test_the_first_report_of_a_node_is_believed() -> None:
    node = Node("http://n", role=Role.PREFILL)
    node.note_load(Load(running=10, waiting_tokens=1_000))
    assert (node.requests, node.tokens) == (10, 1_000) == (node.certain_requests, node.certain_tokens)


def test_so_is_the_first_report_in_another_role_and_of_another_process(pool: Pool) -> None:
    node = pool.nodes[0]
    for _ in range(100):
        node.note_load(Load(running=10, waiting_tokens=1_000))
    node.take_role(Role.DECODE)
    node.note_load(Load())
    assert (node.requests, node.tokens) == (0, 0)
    other = pool.nodes[1]
    for at in range(100):
        pool.report(other, report(load=Load(running=10, waiting_tokens=1_000), generation="one"), at, at)
    assert (other.requests, other.tokens) == (10, 1_000)
    pool.report(other, report(load=Load(), generation="two"), 101.0, 101.0)
    assert (other.requests, other.tokens) == (0, 0)


def test_a_blamed_node_returns_only_by_a_check_started_after_the_blame(pool: Pool) -> None:
    node = pool.nodes[0]
    pool.blame(node, "it broke", now=5.0)
    pool.report(node, report(), started=4.9, now=5.1)
    assert not node.up
    pool.report(node, report(), started=5.2, now=5.3)
    assert node.up


def test_a_node_of_another_role_is_kept_out_with_one_sentence(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    node = pool.nodes[0]
    for at in (1.0, 2.0):
        pool.report(node, report("decode"), at, at)
    assert not node.up
    assert [line for line in caplog.messages if "listed as a prefill node and says that it is decode" in line] == [
        f"prefill node http://p0 is kept out: {node.reason}"
    ]


def test_nodes_of_several_models_are_groups_and_a_leg_stays_in_its_own(pool: Pool) -> None:
    pool.report(pool.nodes[1], report(model="other"), 1.0, 1.0)
    assert pool.models() == {"m": 0, "other": 0}
    assert [node.url for node in pool.up(Role.PREFILL, model="other")] == ["http://p1"]
    assert len(pool.up(Role.PREFILL)) == 2
    pool.require_ready("m")
    with pytest.raises(NoNode, match="no decode node that is up has 'other'"):
        pool.require_ready("other")


def test_a_model_whose_nodes_are_down_is_still_known(pool: Pool) -> None:
    for node in pool.nodes:
        pool.miss(node, "gone", 1.0, 1.0)
    assert list(pool.models()) == ["m"]
    pool.report(pool.nodes[0], report(model="other"), 2.0, 2.0)
    assert sorted(pool.models()) == ["m", "other"]
    with pytest.raises(NoNode):
        pool.require_ready("m")


def test_an_adapter_that_several_models_have_means_one_of_them_in_both_legs() -> None:
    urls = ["http://p0", "http://p1"], ["http://d0", "http://d1"]
    pool = Pool(*urls, random.Random(1))
    for node, model in zip(pool.nodes, ("b", "a", "b", "a"), strict=True):
        pool.report(node, HealthReport(node.role, model, adapters=["x", "a"]), 0.0, 0.1)
    assert pool.adapters() == {"x": "a", "a": "a"}
    for role in (Role.PREFILL, Role.DECODE):
        assert [node.model for node in pool.up(role, model="x")] == ["a"]
        assert [node.model for node in pool.up(role, model="a")] == ["a"]  # a model's own name comes first


def test_the_longest_context_of_a_model_is_what_each_of_its_nodes_can_take(pool: Pool) -> None:
    for node, longest in zip(pool.nodes, (100, 50, 200), strict=True):
        pool.report(node, HealthReport(node.role, "m", max_model_len=longest), 1.0, 1.0)
    assert pool.models() == {"m": 50}


def test_a_node_that_was_never_up_says_nothing_of_the_longest_context(pool: Pool) -> None:
    for node in pool.nodes:
        pool.report(node, HealthReport(node.role, "m", max_model_len=100), 1.0, 1.0)
    for url in ("http://new", "http://newer"):
        pool.add(NodeSpec(url, Role.DECODE, "m"), Source.KUBERNETES, 1.0)  # its pod is labelled with the model
        assert pool.models() == {"m": 100}


def cut_count(pool: Pool, node: Node) -> tuple[list[str], "object"]:
    cuts: list[str] = []
    context = pool.lease(Ask(node.role, tokens=0), [other for other in pool.nodes if other is not node])
    lease = context.__enter__()
    lease.cut = lambda: cuts.append("cut")
    return cuts, context


def test_legs_on_a_silent_node_are_cut_after_three_missed_checks(pool: Pool) -> None:
    cuts, _context = cut_count(pool, pool.nodes[0])
    for at in range(LOST_AFTER_MISSES - 1):
        pool.miss(pool.nodes[0], "silent", float(at), float(at))
    assert (pool.nodes[0].up, cuts) == (False, [])
    for late in (float(at) - 0.5, 9.0):  # the first overlaps another one
        assert cuts == []
        pool.miss(pool.nodes[0], "silent", late, 9.0)
    assert cuts == ["cut"]


def test_an_answered_check_starts_the_count_of_misses_anew(pool: Pool) -> None:
    cuts, _context = cut_count(pool, pool.nodes[0])
    for at in range(LOST_AFTER_MISSES * 2):
        pool.miss(pool.nodes[0], "silent", float(at), float(at))
        pool.unready(pool.nodes[0], "its health check answers 503", float(at))
    assert cuts == []


def test_legs_on_a_restarted_node_are_cut(pool: Pool) -> None:
    cuts, _context = cut_count(pool, pool.nodes[0])
    pool.report(pool.nodes[0], report(generation="g2"), 1.0, 1.0)
    assert (pool.nodes[0].up, cuts) == (True, ["cut"])


def test_legs_on_a_node_that_says_that_its_engine_is_dead_are_cut(pool: Pool) -> None:
    cuts, _context = cut_count(pool, pool.nodes[0])
    pool.dead(pool.nodes[0], "the engine process has said nothing for 21 s", 1.0)
    assert (pool.nodes[0].up, cuts) == (False, ["cut"])


def test_a_node_that_does_not_say_which_process_it_is_is_the_one_that_it_was(pool: Pool) -> None:
    node = pool.nodes[0]
    cuts, _context = cut_count(pool, node)
    pool.drain(node, 1.0)
    pool.report(node, report(generation=""), 2.0, 2.0)
    assert (cuts, node.generation, node.drain_asked) == ([], "g1", True)
    pool.report(node, report(generation="g2"), 3.0, 3.0)
    assert (cuts, node.drain_asked) == (["cut"], False)


def test_our_own_legs_count_at_once_and_their_tokens_until_they_answer(pool: Pool) -> None:
    node = pool.nodes[0]
    pool.report(node, report(load=Load(free_blocks=100, total_blocks=100, block_size=16)), 1.0, 1.0)
    ask = Ask(Role.PREFILL, tokens=300, cached={node.url: 200})
    with pool.lease(ask, [pool.nodes[1]]) as lease:
        # Also what is cached: free blocks are what it is in.
        assert (node.requests, node.tokens, node.kv_room) == (1, 100, 1600 - 19 * 16)
        for _ in range(2):
            node.answered(lease, 300)
        assert (node.requests, node.tokens, node.kv_room) == (1, 0, 1600 - 19 * 16)
        node.note_load(Load(running=1, free_blocks=81, total_blocks=100, block_size=16))
        assert node.kv_room == 81 * 16
        node.note_load(Load(free_blocks=100, total_blocks=100, block_size=16))
    assert (node.requests, node.tokens, node.kv_room) == (0, 0, 1600)


def test_a_role_has_the_policy_that_is_named_and_choices_are_counted() -> None:
    pool = Pool(["http://p0", "http://p1"], [], random.Random(1), {Role.PREFILL: "round_robin"})
    for node in pool.nodes:
        pool.report(node, report(), 0.0, 0.1)
    chosen = []
    for _ in range(4):
        with pool.lease(Ask(Role.PREFILL, tokens=10, cached={"http://p0": 5})) as lease:
            chosen.append(lease.node.url[-2:])
    assert chosen == ["p0", "p1", "p0", "p1"]
    assert pool.choices == {(Role.PREFILL, True): 2, (Role.PREFILL, False): 2}


def test_a_node_that_joins_is_as_fast_as_its_fleet_until_it_is_measured(pool: Pool) -> None:
    first, second, decode = pool.nodes
    for _ in range(10):
        first.rates.prefilled(1_000, 9_000.0)
    assert second.rates.prefill_ms(1_000) > 7_000
    assert decode.rates.prefill_ms(1_000) > 7_000  # as long as it has computed none itself
    decode.rates.prefilled(1_000, 20.0)
    assert decode.rates.prefill_ms(1_000) < 7_000
