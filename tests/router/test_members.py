"""Which nodes are there: what several sources say, joined and told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import leg_on

from kvrelay.router.nodes.node import HealthReport, Node, NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode, RequestError

P, D = NodeSpec("http://p", Role.PREFILL), NodeSpec("http://d", Role.DECODE)


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
    pool.joined = lambda node: seen.update({node.url: node})
    pool.left = lambda node: seen.pop(node.url) and None
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


def test_a_removed_node_takes_no_new_legs_and_is_there_until_its_last_one_has_ended() -> None:
    pool, node, _ = ready_pool()
    gone: list[Node] = []
    pool.left = gone.append
    with leg_on(pool, Role.PREFILL):
        pool.set_members(Source.STATIC, [D], 2.0)
        with pytest.raises(NoNode), leg_on(pool, Role.PREFILL):
            pass
        up(pool, node, at=3.0)  # it is watched, and stays out
        assert (node.up, pool.leaving, gone) == (False, [node], [])
    assert (pool.leaving, gone) == ([], [node])


def test_a_node_that_comes_back_while_it_leaves_is_the_same_node() -> None:
    pool, node, _ = ready_pool()
    with leg_on(pool, Role.PREFILL):
        pool.set_members(Source.STATIC, [D], 2.0)
        pool.set_members(Source.HEARTBEATS, [P], 3.0)
        assert pool.find("http://p") is node
        up(pool, node, at=2.9)
        assert not node.up  # by a check that was started before
        up(pool, node, at=3.0)
        assert node.up
    assert pool.leaving == []


def test_a_list_that_was_not_applied_is_applied_when_it_is_told_again() -> None:
    pool, _, _ = ready_pool()

    def fail(_node: Node) -> None:
        raise ValueError("a mistake of ours")

    pool.joined = fail
    wanted = [NodeSpec("http://new", Role.DECODE), D]
    with pytest.raises(ValueError, match="mistake"):
        pool.set_members(Source.STATIC, wanted, 2.0)
    pool.joined = lambda _node: None
    pool.set_members(Source.STATIC, wanted, 3.0)
    assert [node.url for node in pool.nodes] == ["http://d", "http://new"]
