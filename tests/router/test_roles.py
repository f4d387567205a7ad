"""Roles that follow the load: when a node should change, which one, and how often if several
routers see it.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge
from router_doubles import (
    MODEL,
    OPERATOR,
    Cluster,
    FakeNode,
    cluster,
    decode,
    prefill,
    router_over,
    until,
)

from kvrelay.router.node_load import NodeLoad
from kvrelay.router.nodes.node import HealthReport, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.request.failures import RunContext
from kvrelay.router.roles import LOOKS, OTHER, RoleChanger, RolePlanner, use_of, work_of
from kvrelay.wire.config import Role
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.step_costs import StepCosts

P, D = Role.PREFILL, Role.DECODE
COSTS = StepCosts(4.0, 0.01, 2e-5, 0.0, 0.02, 1e-6)
BUSY = Load(legs=1, prompt_share=1.2)


def looked(
    roles: RolePlanner, up: dict[Role, int], work: dict[Role, float], times: int, left: float = 1.0
) -> list[Any]:
    return [roles.look(up, work, left) for _ in range(times)]


# The work.


def test_work_is_reckoned_in_nodes() -> None:
    load = NodeLoad("d", COSTS)
    load.announced(
        Load(running=10, context_tokens=10_000, legs=1, pace=2.0, token_rate=2.0, prompt_share=0.25)
    )
    other = NodeLoad("p", COSTS)
    other.announced(Load(legs=1, prompt_share=0.5))
    per_token_ms = 2.0 * (0.01 + 2e-5 * 1_000)
    usual_ms = 2.0 * 14.4  # at its pace; half of that counts at least
    told = (40.0, 0.0, 40.0), (0.0, 0.0, usual_ms), (40.0, 20.0, 20.0), (40.0, 10.0, usual_ms / 2)
    for told_ms, strictest_ms, tpot_ms in told:
        load.strictest_tpot_ms = strictest_ms
        left = 1 - 8.0 / tpot_ms
        work, may = work_of({P: [other], D: [load]}, told_ms)
        assert work == pytest.approx({P: 0.75, D: 2.0 * per_token_ms / left})
        assert may == pytest.approx(left)


def test_what_was_refused_is_work_up_to_as_much_as_is_served() -> None:
    served, other = NodeLoad("d", COSTS), NodeLoad("p", COSTS)
    served.announced(Load(running=1, context_tokens=1_000, legs=1, token_rate=2.0))
    other.announced(Load(legs=1, prompt_share=0.5))
    loads = {P: [other], D: [served]}
    alone, left = work_of(loads)
    some, _ = work_of(loads, 0.0, (0.2, 1.0))
    assert some == pytest.approx({P: 0.7, D: 1.5 * alone[D]})
    assert work_of(loads, 0.0, (9.0, 99.0)) == (
        pytest.approx({P: 1.0, D: 2 * alone[D]}),
        left,
    )


def test_requests_that_wait_for_a_seat_are_work() -> None:
    full, idle = NodeLoad("d0", COSTS), NodeLoad("d1", COSTS)
    full.announced(Load(running=16, waiting=20, legs=1, token_rate=0.1, max_num_seqs=16))
    idle.announced(Load(legs=1, max_num_seqs=16))
    assert work_of({P: [], D: [full, idle]})[0][D] == pytest.approx(36 / 16)


def test_a_target_that_no_node_keeps_and_no_nodes_at_all_are_work_too() -> None:
    load = NodeLoad("d", COSTS)
    load.announced(Load(running=1, legs=1, token_rate=0.1))
    assert 0 < work_of({P: [], D: [load]}, 1.0)[0][D] < 1
    assert work_of({P: [], D: []})[0] == {P: 0.0, D: 0.0}


# The decision.


def test_a_role_that_is_short_gets_a_node_after_several_looks() -> None:
    roles = RolePlanner()
    assert looked(roles, {P: 1, D: 3}, {P: 1.2, D: 0.6}, LOOKS) == [None] * (LOOKS - 1) + [P]
    told = "1 prefill nodes with 120% to do, 3 decode nodes with 20% to do"
    assert roles.why == f"one decode node becomes a prefill node: {told}"
    assert roles.use == {P: pytest.approx(1.2), D: pytest.approx(0.2)}
    # Without prefill nodes both roles have the same to do: decode nodes that spill leave prompts to one.
    assert looked(RolePlanner(), {P: 0, D: 2}, {P: 1.2, D: 0.5}, LOOKS, 0.62)[-1] is P


# With the last prefill node: a step on this card takes 5.7 ms empty, of 15 that it may (left 0.62).
@pytest.mark.parametrize(
    ("least", "up", "work", "why"),
    [
        (0, {P: 2, D: 2}, {P: 1.6, D: 0.1}, "no role is short of nodes"),
        (0, {P: 3, D: 1}, {P: 3.5, D: 0.1}, "no other split has much less to do"),
        (0, {P: 2, D: 2}, {P: 1.9, D: 0.9}, "no other split has much less to do"),
        (0, {P: 1, D: 1}, {P: 0.76, D: 0.95}, "no other split has much less to do"),
        (0, {P: 1, D: 1}, {P: 0.2, D: 0.8}, "no role is short of nodes"),
        (1, {P: 1, D: 1}, {P: 0.49, D: 1.03}, "no other split has much less to do"),
        (0, {P: 0, D: 2}, {P: 0.1, D: 0.2}, "no role is short of nodes"),
    ],
)
def test_all_stay_what_they_are_for_a_reason(
    least: int, up: dict[Role, int], work: dict[Role, float], why: str
) -> None:
    roles = RolePlanner(least)
    assert not any(looked(roles, up, work, 20, 0.62))
    assert roles.why.startswith(why)


def test_what_hinders_is_told() -> None:
    up, work, roles = {P: 1, D: 3}, {P: 1.2, D: 0.6}, RolePlanner()
    looked(roles, up, work, LOOKS - 1)
    assert roles.look(up, work, 1.0, "a node is changing") is None
    assert roles.why.startswith("a node is changing: ")
    assert looked(roles, up, work, LOOKS - 1) == [None] * (LOOKS - 2) + [P]


def test_what_piled_up_before_a_change_does_not_count_after_it() -> None:
    roles = RolePlanner()
    looked(roles, {P: 2, D: 6}, {P: 9.0, D: 0.0}, LOOKS)
    assert looked(roles, {P: 3, D: 5}, {P: 0.6, D: 5.5}, LOOKS) == [None] * (LOOKS - 1) + [D]


def test_looks_begin_anew_when_a_node_has_come_gone_or_changed() -> None:
    roles, work = RolePlanner(), {P: 1.2, D: 0.6}
    looked(roles, {P: 1, D: 4}, work, LOOKS - 1)
    assert looked(roles, {P: 1, D: 3}, work, LOOKS) == [None] * (LOOKS - 1) + [P]


def test_the_way_back_costs_twice_the_margin() -> None:
    up, work = {P: 3, D: 5}, {P: 1.6, D: 4.75}  # with 2P prompts take 80 %, now answers 95
    roles = RolePlanner()
    assert P in looked(roles, {P: 2, D: 6}, {P: 2.4, D: 1.0}, LOOKS)
    assert not any(looked(roles, up, work, 100))
    assert D in looked(RolePlanner(), up, work, LOOKS)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(0, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=200),
)
def test_whatever_comes_no_role_has_fewer_nodes_than_it_must(
    nodes: int, least_prefill: int, least_decode: int, works: list[tuple[float, float]]
) -> None:
    least = {P: least_prefill, D: least_decode}
    up = {P: max(least_prefill, nodes // 2), D: max(least_decode, nodes - nodes // 2)}
    roles = RolePlanner(least_prefill, least_decode)
    for of_p, of_d in works * 5:
        role = roles.look(up, {P: of_p, D: of_d}, 0.62)
        if role is not None:
            up = {role: up[role] + 1, OTHER[role]: up[OTHER[role]] - 1}
        assert all(up[each] >= least[each] for each in up)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(2, 16),
    st.floats(0.05, 0.95),
    st.floats(0.3, 0.95),
    st.floats(0.0, 0.3),
    st.integers(0, 1 << 20),
)
@example(16, 0.875, 0.75, 0.0, 1)  # one node more is less than the margin
def test_an_hour_of_steady_work_ends_near_the_best_ratio_without_flapping(
    nodes: int, share: float, load: float, noise: float, seed: int
) -> None:
    """`share` of the work is prefill's, of `load` of all nodes; each look sees it with noise."""
    rng, roles = random.Random(seed), RolePlanner()
    need = {P: nodes * load * share, D: nodes * load * (1 - share)}
    prefills = rng.randrange(1, nodes)
    up, flips = {P: prefills, D: nodes - prefills}, []
    for look in range(720):
        seen = {role: work * rng.uniform(1 - noise, 1 + noise) for role, work in need.items()}
        role = roles.look(up, seen, 1.0)
        if role is not None:
            up = {role: up[role] + 1, OTHER[role]: up[OTHER[role]] - 1}
            flips.append(look)
    assert sum(look > 360 for look in flips) <= 2
    assert len(flips) <= nodes + 2

    def use(count: int) -> float:
        return max(use_of(need, {P: count, D: nodes - count}, 1.0).values())

    best = min(use(count) for count in range(1, nodes))
    assert use(up[P]) <= max(best / (1 - 0.2) * 1.05, 0.9 / (1 - noise / 2))


def test_the_last_prefill_node_decodes_where_all_do_less_then_and_goes_back() -> None:
    roles, left = RolePlanner(), 0.62
    busy, calm = {P: 0.49, D: 1.03}, {P: 0.3, D: 0.62}
    assert looked(roles, {P: 1, D: 1}, busy, LOOKS, left)[-1] is D
    assert roles.why.startswith("one prefill node becomes a decode node: ")
    assert not any(looked(roles, {P: 0, D: 2}, busy, 99, left))
    assert roles.use == pytest.approx(dict.fromkeys((P, D), (1.03 + 0.49 / left) / 2))
    assert P in looked(roles, {P: 0, D: 2}, calm, 40, left)


# Who is asked.


def told(pool: Pool, node: Node, role: Role, at: float = 1.0, **more: Any) -> None:
    fields = {"generation": "g1", "load": BUSY if role is P else Load(legs=1), "model": "m", **more}
    pool.note_report(node, HealthReport(role, **fields), at, at)


class Fixture:
    """A pool of which prefill nodes have more work than they can do, and looks that are made by
    hand.
    """

    def __init__(self, decodes: int = 3, status: int = 202, **config: Any) -> None:
        self.pool = Pool(["http://p0"], [f"http://d{at}" for at in range(decodes)])
        for node in self.pool.nodes:
            told(self.pool, node, node.role)
            node.state.set_costs(COSTS, 50.0)
        self.status, self.asked, self.ending = status, list[str](), False
        self.refused = {"m": (0.0, 0.0)}
        registry: Any = CollectorRegistry()
        metrics: Any = type("Metrics", (), {})()
        metrics.role_use = Gauge("g", "", ["model", "role"], registry=registry)
        metrics.role_changes = Counter("c", "", ["model", "role", "outcome"], registry=registry)
        placer: Any = None
        legs: Any = self
        context = RunContext(self.pool, placer, legs, metrics, RouterConfig(**config))
        self.registry, self.changes = (
            registry,
            RoleChanger(
                context, lambda: self.ending, lambda model: self.refused.get(model, (0.0, 0.0))
            ),
        )

    async def post(
        self, node: Node, path: str, body: bytes, deadline_s: float
    ) -> tuple[int, bytes | str]:
        """Answer as a node does that is asked to change its role."""
        assert (path, deadline_s) == ("/admin/role", 5.0)
        assert json.loads(body)["role"] in (P, D)
        self.asked.append(node.url)
        return self.status, "it will not"

    async def look(self, times: int = LOOKS) -> RolePlanner:
        for _ in range(times):
            await self.changes.look()
        return self.changes.models["m"]


async def test_the_last_by_address_is_asked_and_nothing_else_begins_until_it_has_changed() -> None:
    fixture = Fixture()
    seen = await fixture.look(20)
    assert fixture.asked == ["http://d2"]
    assert seen.why.startswith("http://d2 changes its role: ")
    assert (
        fixture.registry.get_sample_value("c_total", {"model": "m", "role": P, "outcome": "begun"})
        == 1
    )
    assert fixture.registry.get_sample_value("g", {"model": "m", "role": P}) == pytest.approx(1.2)
    node = fixture.pool.nodes[-1]
    told(fixture.pool, node, P, at=1e12, flips=1, load=Load(legs=1))
    seen = await fixture.look(20)
    assert fixture.asked == ["http://d2"]
    assert seen.why.startswith("no role is short of nodes: 2 prefill nodes")


async def test_a_role_is_short_of_nodes_for_what_is_refused() -> None:
    fixture, half = Fixture(), Load(legs=1, prompt_share=0.6)
    told(fixture.pool, fixture.pool.nodes[0], P, load=half)
    seen = await fixture.look(20)
    assert (seen.why[:29], fixture.asked) == ("no role is short of nodes: 1 ", [])
    fixture.refused["m"] = (0.6, 0.0)
    await fixture.look(20)
    assert fixture.asked == ["http://d2"]


@pytest.mark.parametrize("status", [503, 409, 200])
async def test_one_that_refuses_is_asked_again(status: int) -> None:
    fixture = Fixture(status=status)
    await fixture.look(4 * LOOKS)
    assert fixture.asked == ["http://d2"] * 4
    refused = {"model": "m", "role": P, "outcome": "refused"}
    assert fixture.registry.get_sample_value("c_total", refused) == 4


async def test_strict_roles_bounds_and_unknown_costs_keep_nodes_what_they_are() -> None:
    unknown = Fixture()
    node = unknown.pool.nodes[-1]
    node.state = NodeLoad(node.url)
    for fixture, why in (
        (Fixture(strict_roles=True), "roles are strict"),
        (Fixture(least_decode=3), "no other split has much less to do"),
        (unknown, "http://d2 has not said what its steps cost"),
    ):
        assert (await fixture.look(20)).why.startswith(why)
        assert fixture.asked == []


async def test_a_router_that_ends_looks_no_more() -> None:
    fixture = Fixture()
    fixture.ending = True
    await fixture.changes.look()
    assert fixture.changes.models == {}


async def test_nothing_begins_before_a_node_that_refuses_legs_has_said_why() -> None:
    fixture = Fixture()
    node = fixture.pool.nodes[-1]
    fixture.pool.note_draining(node, 5.0)
    assert (await fixture.look(9)).why.startswith("http://d2 changes its role: ")
    told(fixture.pool, node, D, at=6.0, flips_to=P)
    assert (await fixture.look(9)).why.startswith("http://d2 changes its role: ")
    assert fixture.asked == []
    told(fixture.pool, node, D, at=7.0, status="draining")
    await fixture.look()
    assert fixture.asked == ["http://d1"]


async def test_each_model_is_looked_at_by_itself() -> None:
    fixture = Fixture()
    for node in fixture.pool.nodes[2:]:
        told(fixture.pool, node, D, at=2.0, model="other")
    assert (await fixture.look(20)).why.startswith("no other split has much less to do")
    assert set(fixture.changes.models) == {"m", "other"}
    assert fixture.asked == []
    fixture = Fixture()
    for more in ({}, {"flips_to": P}):
        told(fixture.pool, fixture.pool.nodes[1], D, at=2.0, model="other", **more)
    await fixture.look()
    assert fixture.asked == ["http://d2"]  # what hinders one model does not hinder the other


# In routers.


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_however_many_routers_look_one_node_changes_once(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("kvrelay.router.router.EVERY_S", 1e6)  # all looks are made here
    nodes: list[FakeNode] = [prefill(load=BUSY), *(decode(load=Load(legs=1)) for _ in range(3))]
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(cluster(*nodes, strict_roles=False))
        others = [router_over(first.router.config) for _ in range(count - 1)]
        routers = [first, *[await stack.enter_async_context(other) for other in others]]
        chosen = max(nodes[1:], key=lambda node: node.url)
        for each in routers:
            await each.all_up()
            for node in each.router.pool.nodes:
                node.state.set_costs(COSTS, 50.0)

        async def look(times: int) -> None:
            for _ in range(times):
                await asyncio.gather(*(changes_of(each).look() for each in routers))

        await look(LOOKS)
        assert [node for node in nodes if node.flips_to] == [chosen]
        await until(lambda: all(each.node(chosen).flips_to is P for each in routers))
        await look(1)
        chosen.flipped()
        await until(
            lambda: all(each.node(chosen).role is P and each.node(chosen).up for each in routers)
        )
        await look(40)
        assert [node.role for node in nodes].count(P) == 2
        assert sum(node.flips for node in nodes) == 1
        begun = [
            each.metric("kvrelay_router_role_changes_total", outcome="begun", model_name=MODEL)
            for each in routers
        ]
        assert sum(begun) == 1
        assert first.metric("kvrelay_router_role_use", role=P) == pytest.approx(0.6, rel=0.01)
        async with first.http.get(first.url + "/console/state", headers=OPERATOR) as answer:
            (seen,) = (await answer.json())["roles"]
        assert (seen["model"], seen["use"]["prefill"]) == (MODEL, pytest.approx(0.6, rel=0.01))


def changes_of(each: Cluster) -> RoleChanger:
    found = each.router.roles
    assert found is not None
    return found
