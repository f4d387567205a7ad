"""Nodes that change their roles while they run: what the pool makes of it, and the route that asks
for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_doubles import (
    OPERATOR,
    Call,
    Cluster,
    FakeNode,
    cluster,
    decode,
    error,
    prefill,
    until,
)

from kvrelay.router.node_load import Share
from kvrelay.router.nodes.node import HealthReport, Node, NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.outputs import Load

P, D = Role.PREFILL, Role.DECODE


def told(
    node: Node,
    pool: Pool,
    role: Role,
    at: float,
    flips: int = 0,
    to: Role | None = None,
    **more: Any,
) -> None:
    fields = {"generation": "g1", **more}
    pool.note_report(node, HealthReport(role, "m", flips=flips, flips_to=to, **fields), at, at)


@pytest.fixture
def pool() -> Pool:
    pool = Pool(["http://p0", "http://p1"], ["http://d"])
    for node in pool.nodes:
        told(node, pool, node.role, 1.0)
    return pool


def urls(pool: Pool, role: Role) -> list[str]:
    return [node.url for node in pool.up(role)]


def test_a_node_that_flips_takes_nothing_and_is_then_what_it_says(pool: Pool) -> None:
    node = pool.nodes[1]
    told(node, pool, P, 2.0, to=D)
    assert (node.up, node.flips_to, node.role) == (False, D, P)
    assert node.reason == "it changes its role from prefill to decode"
    told(node, pool, D, 3.0, flips=1)
    assert (node.up, node.flips_to, node.role) == (True, None, D)
    assert (urls(pool, P), urls(pool, D)) == (["http://p0"], ["http://p1", "http://d"])
    told(node, pool, P, 4.0, flips=2)
    assert (urls(pool, P), urls(pool, D)) == (["http://p0", "http://p1"], ["http://d"])


def test_a_flip_that_is_called_off_or_whose_node_dies_leaves_the_old_role(pool: Pool) -> None:
    node = pool.nodes[1]
    pool.note_role_change(node, D, 2.0)
    told(node, pool, P, 1.9)  # asked before
    assert (node.up, node.flips_to) == (False, D)
    told(node, pool, P, 2.1)
    assert (node.up, node.flips_to, node.role) == (True, None, P)
    pool.note_role_change(node, D, 3.0)
    pool.note_unready(node, "gone", 3.1, missed=True)
    assert (node.up, node.flips_to, node.reason) == (False, None, "gone")


def test_a_node_that_is_started_again_is_what_it_is_listed_as(pool: Pool) -> None:
    node = pool.nodes[1]
    told(node, pool, D, 2.0, flips=1)
    told(node, pool, P, 3.0, generation="g2")
    assert (node.up, node.role) == (True, P)
    told(node, pool, D, 4.0, generation="g3")  # started by hand as another one
    assert not node.up
    assert "listed as a prefill node and says that it is decode" in node.reason


def test_every_way_of_membership_follows_the_node() -> None:
    """Heartbeats say the new role; static lists and labels of pods go on saying the old one."""
    pool = Pool([], [])
    pool.set_members(Source.KUBERNETES, [NodeSpec("http://k", P, generation="uid")], 1.0)
    pool.set_members(Source.HEARTBEATS, [NodeSpec("http://h", P, generation="g1")], 1.0)
    pod, beating = pool.nodes
    for node in pool.nodes:
        told(node, pool, P, 2.0)
    lease = pool.hold(beating, Share(), None)
    pool.set_members(Source.HEARTBEATS, [NodeSpec("http://h", D, generation="g1")], 3.0)
    assert (pool.nodes, beating.role, beating.up) == ([pod, beating], D, False)
    pool.give_back(lease)
    told(beating, pool, P, 2.9)  # a check that was started before
    assert beating.role is D
    for node in pool.nodes:
        told(node, pool, D, 4.0, flips=1)
    pool.set_members(Source.KUBERNETES, [NodeSpec("http://k", P, generation="uid")], 5.0)
    assert urls(pool, D) == ["http://k", "http://h"]


async def ask(c: Cluster, node: FakeNode, role: str, **more: Any) -> tuple[int, Any]:
    return await c.operate("/admin/nodes/role", {"url": node.url, "role": role, **more})


async def test_a_late_answer_does_not_take_a_node_that_has_changed_out_of_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def late(call: Call) -> Any:
        await p.resume.wait()
        return error(503, "this node is draining", "draining")

    p = prefill(late)
    async with cluster(p, prefill(load=Load(waiting=9, waiting_tokens=5_000)), decode()) as c:
        asked = asyncio.create_task(c.text())
        await until(lambda: bool(p.calls))
        p.flips_to = D
        p.flipped()
        await until(lambda: c.node(p).role is D)
        p.resume.set()
        await asked
        assert c.node(p).up
        assert "is kept out" not in caplog.text


async def test_the_last_node_of_a_role_keeps_it_unless_the_operator_insists() -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as c:
        for node, role in ((p, "decode"), (d, "prefill")):
            status, body = await ask(c, node, role)
            assert (status, body["error"]["code"]) == (409, "last_of_role")
            assert "force" in body["error"]["message"]
        assert (p.flips_to, d.flips_to) == (None, None)
        status, body = await ask(c, p, "decode", force=True)
        assert (status, p.flips_to) == (200, "decode")
        status, body = await ask(c, p, "prefill")  # calls it off
        assert (status, p.flips_to) == (200, None)
        await until(lambda: c.node(p).up)


async def test_two_orders_at_once_leave_a_role_its_last_node() -> None:
    async with cluster(one := prefill(), two := prefill(), decode()) as c:
        answers = await asyncio.gather(ask(c, one, "decode"), ask(c, two, "decode"))
        assert sorted(status for status, _ in answers) == [200, 409]


@pytest.mark.parametrize(("answers", "status"), [(409, 409), (400, 400), (404, 404), (500, 502)])
async def test_what_the_node_says_against_it_is_told(answers: int, status: int) -> None:
    p, other, d = prefill(), prefill(role_status=answers), decode()
    async with cluster(p, other, d) as c:
        told, body = await ask(c, other, "decode")
        assert told == status, body
        assert other.url in body["error"]["message"]
        assert c.node(other).up
        assert (await ask(c, other, "aggregated"))[0] in (400, status)
        assert (await ask(c, other, "chef"))[0] == 400
        asked = {"url": "http://x", "role": "decode"}
        assert (
            await c.ask("POST", "/admin/nodes/role", json=asked, headers=OPERATOR)
        ).status == 404
