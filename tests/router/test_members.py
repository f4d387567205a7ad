"""Which nodes are there: what several sources say, joined and told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import leg_on

from kvrelay.router.nodes.members import NodeSpec, Source
from kvrelay.router.nodes.node import HealthReport, Node
from kvrelay.router.nodes.pool import LOST_AFTER_MISSES, Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode, RequestError

P, D = NodeSpec("http://p", Role.PREFILL), NodeSpec("http://d", Role.DECODE)


def test_a_node_that_several_sources_name_stays_until_the_last_one_drops_it() -> None:
    pool = Pool(["http://p"], ["http://d"])
    pool.set_members(Source.HEARTBEATS, [D], 1.0)
    assert pool.sources("http://d") == [Source.STATIC, Source.HEARTBEATS]
    pool.set_members(Source.STATIC, [P], 2.0)
    assert [node.url for node in pool.nodes] == ["http://p", "http://d"]
    pool.set_members(Source.HEARTBEATS, [], 3.0)
    assert [node.url for node in pool.nodes] == ["http://p"]


specs = st.builds(
    NodeSpec,
    st.sampled_from([f"http://n{i}" for i in range(4)]),
    st.sampled_from([Role.PREFILL, Role.DECODE]),
    generation=st.sampled_from(["", "a", "b"]),
)


@given(st.lists(st.tuples(st.sampled_from(list(Source)), st.lists(specs, max_size=4)), max_size=12))
def test_the_pool_has_what_the_sources_want_with_the_role_that_the_first_says(
    told: list[tuple[Source, list[NodeSpec]]],
) -> None:
    pool = Pool([], [])
    seen: dict[str, Node] = {}
    pool.follow(
        lambda node: seen.update({node.url: node}), lambda node: seen.pop(node.url) and None
    )
    last: dict[Source, list[NodeSpec]] = {}
    for source, named in told:
        pool.set_members(source, named, 1.0)
        last[source] = named
        roles = {spec.url: spec.role for of in reversed(Source) for spec in last.get(of, ())}
        assert {node.url: node.role for node in pool.nodes} == roles
        assert seen == {url: pool.find(url) for url in roles}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "p:80",
        "ftp://p",
        "http://",
        "http://a b",
        "http://p:port",
        "http://u@p",
        "http://p?x",
        "http://p\n",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="node address"):
        NodeSpec(url, Role.PREFILL)


def test_a_node_that_is_aggregated_is_refused() -> None:
    with pytest.raises(RequestError, match="prefill or decode"):
        NodeSpec("http://p", Role.AGGREGATED)


# In the pool.


def up(pool: Pool, node: Node, generation: str = "g1", at: float = 1.0) -> None:
    pool.note_report(node, HealthReport(node.role, "m", generation=generation), at, at)


def ready_pool() -> tuple[Pool, Node, Node]:
    pool = Pool(["http://p/"], ["http://d"])
    for node in pool.nodes:
        up(pool, node)
    return pool, pool.nodes[0], pool.nodes[1]


def test_nodes_join_and_leave_at_run_time_and_followers_are_told() -> None:
    pool, first, _ = ready_pool()
    seen: list[str] = []
    unfollow = pool.follow(
        lambda node: seen.append(f"+{node.url}"), lambda node: seen.append(f"-{node.url}")
    )
    pool.add(NodeSpec("http://p2", Role.PREFILL), Source.ADMIN, 2.0)
    pool.add(NodeSpec("http://p2/", Role.PREFILL), Source.ADMIN, 2.0)
    assert len(pool.nodes) == 3
    pool.set_members(Source.STATIC, [D], 3.0)
    assert pool.find("http://p") is None
    assert not first.up
    unfollow()
    pool.remove("http://p2", [Source.ADMIN], 4.0)
    assert seen == ["+http://p", "+http://d", "+http://p2", "-http://p"]


def test_a_removed_node_takes_no_new_legs_and_is_there_until_its_last_one_has_ended() -> None:
    pool, node, _ = ready_pool()
    gone: list[Node] = []
    pool.follow(lambda _: None, gone.append)
    with leg_on(pool, Role.PREFILL):
        pool.remove("http://p", [Source.STATIC], 2.0)
        with pytest.raises(NoNode), leg_on(pool, Role.PREFILL):
            pass
        up(pool, node, at=3.0)  # it is watched, and stays out
        assert (node.up, pool.leaving, gone) == (False, [node], [])
    assert (pool.leaving, gone) == ([], [node])


def test_requests_of_a_removed_node_are_cut_when_it_is_silent() -> None:
    pool, node, _ = ready_pool()
    cuts: list[str] = []
    with leg_on(pool, Role.PREFILL) as lease:
        lease.cut = lambda: cuts.append("cut")
        pool.set_members(Source.STATIC, [D], 2.0)
        assert cuts == []
        for at in range(LOST_AFTER_MISSES):
            pool.note_miss(node, "silent", 3.0 + at)
        assert cuts == ["cut"]


def test_a_node_that_comes_back_while_it_leaves_is_the_same_node() -> None:
    pool, node, _ = ready_pool()
    with leg_on(pool, Role.PREFILL):
        pool.remove("http://p", [Source.STATIC], 2.0)
        pool.add(P, Source.HEARTBEATS, 3.0)
        assert pool.find("http://p") is node
        up(pool, node, at=2.9)
        assert not node.up  # by a check that was started before
        up(pool, node, at=3.0)
        assert node.up
    assert pool.leaving == []


def test_legs_are_cut_by_the_health_report_of_another_process_and_not_by_the_news_of_it() -> None:
    """The news may come after the report, when the node has legs of its new life."""
    pool, node, _ = ready_pool()
    cuts: list[str] = []
    first, second = (NodeSpec("http://p", Role.PREFILL, generation=uid) for uid in ("1", "2"))
    pool.add(first, Source.KUBERNETES, 1.0)
    pool.add(first, Source.KUBERNETES, 1.0)
    assert node.up  # the same again changes nothing
    with leg_on(pool, Role.PREFILL) as lease:
        lease.cut = lambda: cuts.append("cut")
        pool.add(second, Source.KUBERNETES, 2.0)
        assert (cuts, node.up) == ([], False)
        up(pool, node, "g1", at=2.1)
        assert (cuts, node.up) == ([], True)
        up(pool, node, "g2", at=2.2)
        assert cuts == ["cut"]


def test_legs_of_a_node_that_tells_no_generation_are_cut_by_the_news_of_another_process() -> None:
    pool, node, _ = ready_pool()
    up(pool, node, "")
    node.generation = ""
    cuts: list[str] = []
    pool.add(NodeSpec("http://p", Role.PREFILL, generation="uid-1"), Source.KUBERNETES, 1.0)
    with leg_on(pool, Role.PREFILL) as lease:
        lease.cut = lambda: cuts.append("cut")
        pool.add(NodeSpec("http://p", Role.PREFILL, generation="uid-2"), Source.KUBERNETES, 2.0)
    assert cuts == ["cut"]
