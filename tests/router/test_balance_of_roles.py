"""The balance of roles in a router: who is asked to change, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Counter
from router_doubles import MODEL, OPERATOR, Call, Cluster, FakeNode, cluster, decode, prefill, until

from planning.balance import Balancing
from router.balance.balancer import Balancer
from router.balance.flips import Flips
from router.balance.seen import Aims
from router.balance.work import Work
from router.nodes.node import HealthReport, Node
from router.nodes.pool import Pool
from router.shared import Alone
from wire.config import Role
from wire.errors import ConfigError, Unavailable
from wire.log_lines import JsonLines
from wire.outputs import Load
from wire.router_config import RouterConfig

P, D = Role.PREFILL, Role.DECODE
AIMS = Aims(200.0, 20.0)
TARGETS: dict[str, Any] = {"balance": True, "ttft_target_ms": 60_000.0, "tpot_target_ms": 10_000.0}


def told(pool: Pool, node: Node, role: Role, at: float = 1.0, **more: Any) -> None:
    fields = {"generation": "g1", "load": Load(block_size=16, total_blocks=1000, free_blocks=1000), **more}
    pool.report(node, HealthReport(role, fields.pop("model", "m"), **fields), at, at)


def pool_of(prefills: int, decodes: int, model: str = "m") -> Pool:
    pool = Pool(
        [f"http://p{at}" for at in range(prefills)], [f"http://d{at}" for at in range(decodes)], random.Random(1)
    )
    for node in pool.nodes:
        told(pool, node, node.role, model=model)
    return pool


def busy(asked: int, prompt: int, **more: int) -> Work:
    """So many prompts of a second each came, and have ended with next to no answer."""
    tokens = asked * prompt
    of_prompts = {"guessed_tokens": tokens, "uncached_tokens": tokens, "prefill_ms": asked * 1e3}
    return Work(asked, tokens, asked, answered=asked, context_tokens=tokens, **of_prompts, **more)


# Who changes.


class Asked:
    """Legs that note what nodes are told."""

    def __init__(self, status: int = 202) -> None:
        self.status = status
        self.told: list[tuple[str, Any]] = []

    async def tell(self, node: Node, path: str, body: bytes, deadline_s: float) -> tuple[int, str]:
        assert path == "/admin/role"
        self.told.append((node.url, json.loads(body)["role"]))
        return self.status, "it will not"


class Fixture:
    """A balancer whose looks are made by hand: prefill has more work than it can do."""

    def __init__(self, pool: Pool, legs: Any, **how: Any) -> None:
        self.pool, self.legs, self.metric = pool, legs, Counter("c", "", ["model", "role", "outcome"], registry=None)
        self.work = busy(10, 4_000, first=9)
        counted: Any = SimpleNamespace(take=lambda: {"m": self.work})
        doubles: Any = SimpleNamespace()
        shared = Alone(pool, doubles, doubles)
        every = {"patience": 1, "cool_down_s": 0.001, **how}
        self.balancer = Balancer(
            pool, shared, counted, Flips(pool, lambda: legs), Balancing(**every), lambda: AIMS, self.metric
        )

    async def look(self) -> Any:
        await self.balancer.look()
        (seen,) = self.balancer.told()
        return seen

    def count(self, role: str, outcome: str) -> float:
        return self.metric.labels("m", role, outcome)._value.get()


async def test_the_busier_role_gets_a_node_of_the_other_one(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(1, 3)
    fixture = Fixture(pool, Asked())
    with caplog.at_level(logging.INFO, "kvrelay.router"):
        seen = await fixture.look()
        assert fixture.legs.told == [("http://d2", "prefill")]
        (change,) = seen.changes
        assert (change.role, change.where, change.outcome) == ("prefill", "http://d2", "under way: http://d2")
        assert "one decode node becomes a prefill node" in change.why
        seen = await fixture.look()
        assert (seen.why, len(seen.changes)) == ("under way: http://d2", 1)
        node = pool.find("http://d2")
        assert node is not None
        told(pool, node, P, at=1e12, flips=1)
        seen = await fixture.look()
    assert seen.changes[-1].outcome.startswith("done in ")
    assert fixture.count("prefill", "done") == 1
    line = next(record for record in caplog.records if "becomes a prefill node" in record.getMessage())
    shown = json.loads(JsonLines("router").format(line))
    assert (shown["model"], shown["role"], shown["where"]) == ("m", "prefill", "http://d2")
    assert (shown["prefill_nodes"], shown["decode_nodes"], shown["prefill_in_time"]) == (1, 3, 0.0)
    assert shown["prefill_use"] > 1
    assert "model=m role=prefill where=http://d2 prefill_nodes=1" in line.getMessage()


async def test_a_node_that_refuses_is_left_alone_and_the_next_one_is_asked() -> None:
    fixture = Fixture(pool_of(1, 3), Asked(404))
    for _ in range(4):
        seen = await fixture.look()
        await asyncio.sleep(0.002)
    assert [url for url, _ in fixture.legs.told] == ["http://d2", "http://d1", "http://d0"]
    assert "no decode node is asked" in seen.why
    assert fixture.count("prefill", "refused") == 4
    assert seen.changes[-1].outcome == "refused: http://d2 does not change its role: it answers 404: it will not"


async def test_of_two_routers_that_decide_at_once_the_second_hears_that_it_is_done() -> None:
    """They choose the same node; that is no failure of it."""
    for status, said in ((409, "it answers 409"), (200, "it is a prefill node already")):
        fixture = Fixture(pool_of(1, 3), Asked(status))
        assert said in (await fixture.look()).changes[0].outcome
        await asyncio.sleep(0.002)
        await fixture.look()
        assert [url for url, _ in fixture.legs.told] == ["http://d2", "http://d2"]


@pytest.mark.parametrize(
    ("what", "why"),
    [("replaced", "its process was replaced"), ("called off", "it has called that off"), ("removed", "it was removed")],
)
async def test_a_change_that_fails_is_told_and_tried_elsewhere_later(what: str, why: str) -> None:
    pool = pool_of(1, 3)
    fixture = Fixture(pool, Asked())
    await fixture.look()
    node = pool.find("http://d2")
    assert node is not None
    if what == "removed":
        pool.remove(node.url, list(pool.members.sources(node.url)), 1e12)
    else:
        told(pool, node, D, at=1e12, generation="g2" if what == "replaced" else "g1")
    seen = await fixture.look()
    outcomes = [change.outcome for change in seen.changes]
    assert why in outcomes[-1]
    assert fixture.count("prefill", "failed") == 1
    await asyncio.sleep(0.002)
    await fixture.look()
    assert fixture.legs.told[-1] == ("http://d1", "prefill")


async def test_a_change_that_is_never_over_blocks_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(1, 3)
    fixture = Fixture(pool, Asked())
    await fixture.look()
    node = pool.find("http://d2")
    assert node is not None
    pool.miss(node, "gone", 1e12, 1e12)
    for _ in range(3):
        await asyncio.sleep(0.002)
        await fixture.look()
    assert len(fixture.legs.told) == 1
    fixture.balancer._models["m"].until = 0.0
    seen = await fixture.look()
    assert "failed: it was not over within 60 s" in [each.outcome for each in seen.changes]


@pytest.mark.parametrize(("status", "outcome"), [(404, "refused"), (202, "failed")])
async def test_from_what_was_no_change_there_is_no_way_back(status: int, outcome: str) -> None:
    pool = pool_of(1, 3)
    fixture = Fixture(pool, Asked(status), cool_down_s=1000.0)
    await fixture.look()
    told(pool, pool.nodes[-1], D, at=1e12)  # one that was asked to is what it was
    assert (await fixture.look()).changes[0].outcome.startswith(outcome)
    assert fixture.balancer._models["m"].balance._last is None


async def test_nodes_that_must_keep_their_role_are_not_asked() -> None:
    pool = pool_of(1, 3)
    drained, down = pool.nodes[3], pool.nodes[2]
    pool.drain(drained, 2.0)
    pool.miss(down, "gone", 2.0, 2.0)
    fixture = Fixture(pool, Asked())
    seen = await fixture.look()
    assert "decode keeps 1 node at least" in seen.why
    assert fixture.legs.told == []


async def test_bounds_hold() -> None:
    fixture = Fixture(pool_of(1, 3), Asked(), least_decode=3)
    assert "decode keeps 3 nodes at least" in (await fixture.look()).why
    assert fixture.legs.told == []


async def test_a_change_by_somebody_else_counts_as_one_of_ours() -> None:
    pool = pool_of(2, 3)
    fixture = Fixture(pool, Asked(), cool_down_s=1000.0)
    work, fixture.work = fixture.work, Work()
    await fixture.look()
    told(pool, pool.nodes[0], P, at=2.0, flips_to=D)
    assert (await fixture.look()).why == "http://p0 is changing its role from prefill to decode"
    fixture.work = work
    fixture.balancer._models["m"].balance._looked_at = 0.0  # what was seen before has faded
    told(pool, pool.nodes[0], D, at=3.0, flips=1)
    assert "the last change is less than 1000 s ago" in (await fixture.look()).why


async def test_a_node_that_was_started_again_has_changed_nothing() -> None:
    """It has the role of its start again: nobody has decided that."""
    pool = pool_of(2, 3)
    fixture = Fixture(pool, Asked())
    fixture.work = Work()
    told(pool, pool.nodes[0], D, at=2.0, flips=1)
    await fixture.look()
    told(pool, pool.nodes[0], P, at=3.0, generation="g2")
    assert pool.nodes[0].role is P
    await fixture.look()
    assert fixture.balancer._models["m"].balance._last is None


async def test_nothing_begins_before_a_node_that_refuses_legs_has_said_why() -> None:
    """Another router may have it change its role: nodes refuse legs with one word for that and for draining."""
    pool = pool_of(1, 3)
    fixture = Fixture(pool, Asked())
    node = pool.nodes[-1]
    pool.drains(node, 5.0)
    assert (await fixture.look()).why.startswith("http://d2 takes no new legs, and its next health check must say")
    told(pool, node, D, at=4.9)  # asked before
    assert "must say" in (await fixture.look()).why
    told(pool, node, D, at=5.1, flips_to=P)
    assert "is changing its role from decode to prefill" in (await fixture.look()).why
    assert fixture.legs.told == []
    told(pool, node, D, at=6.0, status="draining")
    pool.heard(node.url, Load(), 7.0, draining=True)  # as it says again and again
    await asyncio.sleep(0.002)
    await fixture.look()
    assert fixture.legs.told == [("http://d1", "prefill")]


async def test_a_router_that_ends_begins_nothing() -> None:
    nodes = [prefill(), decode(), decode(), decode()]
    async with cluster(*nodes, **TARGETS) as c:
        counted = c.router.counted
        assert counted is not None
        counted.take = lambda: {MODEL: busy(99, 10_000)}  # type: ignore[method-assign]
        balancer: Balancer = c.router.lookout.balance.__self__  # type: ignore[attr-defined]
        c.router.ending = True
        for _ in range(4):
            await balancer.look()
        assert [seen.why for seen in balancer.told()] == ["this router ends"]
        assert not any(node.flips_to for node in nodes)


async def test_each_model_has_a_balance_of_its_own() -> None:
    pool = pool_of(1, 3)
    for node in pool.nodes[2:]:
        told(pool, node, node.role, at=2.0, model="other")
    fixture = Fixture(pool, Asked())
    await fixture.balancer.look()
    mine, other = fixture.balancer.told()
    assert "decode keeps 1 node at least" in mine.why
    assert other.model == "other"
    assert fixture.legs.told == []


# In a router.


async def test_a_router_without_the_option_counts_and_shows_nothing() -> None:
    async with cluster(prefill(), decode()) as c:
        await c.text()
        assert c.router.counted is None
        assert (await state(c))["balance"] == []


async def state(c: Cluster) -> Any:
    async with c.http.get(c.url + "/console/state", headers=OPERATOR) as answer:
        return await answer.json()


async def test_a_router_has_an_idle_node_change_and_shows_it() -> None:
    """Prompts take so long that one prefill node is not enough; three decode nodes have nothing to do."""

    async def slow(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await call.hand_over()

    nodes: list[FakeNode] = [prefill(slow), decode(), decode(), decode()]
    async with cluster(*nodes, **TARGETS) as c:
        counted = c.router.counted
        assert counted is not None
        counted.take = lambda: {  # type: ignore[method-assign]
            MODEL: busy(99, 10_000)
        }
        chosen = max(nodes[1:], key=lambda node: node.url)
        balancer: Balancer = c.router.lookout.balance.__self__  # type: ignore[attr-defined]
        for _ in range(3):  # instead of waiting for its own looks
            await balancer.look()
        assert chosen.flips_to == "prefill"
        await until(lambda: c.node(chosen).flips_to is P)
        (seen,) = (await state(c))["balance"]
        assert seen["changes"][0]["where"] == chosen.url
        chosen.flipped()
        await until(lambda: c.node(chosen).up and c.node(chosen).role is P)
        await balancer.look()
        (seen,) = (await state(c))["balance"]
        assert (seen["model"], seen["roles"]["prefill"]["nodes"]) == (MODEL, 2)
        assert seen["changes"][0]["outcome"].startswith("done")
        assert c.metric("kvrelay_router_role_changes_total", model_name=MODEL, role="prefill", outcome="done") == 1
        await c.text()


async def test_other_processes_that_do_not_answer_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    fixture = Fixture(pool_of(1, 3), Asked())

    async def silent() -> list[dict[str, Work]]:
        raise Unavailable("they are silent")

    fixture.balancer._shared = SimpleNamespace(work_elsewhere=silent)  # type: ignore[assignment]
    await fixture.look()
    assert fixture.legs.told
    assert "looked at without the other processes: they are silent" in caplog.text


# Its settings.


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"balance": True}, "balance needs ttft_target_ms and tpot_target_ms above 0, got 0 and 0"),
        ({"balance": True, "ttft_target_ms": 200.0}, "got 200 and 0"),
        ({**TARGETS, "least_decode": 0}, "least_decode must be at least 1, got 0"),
        ({**TARGETS, "prefill_deployment": "p"}, "give both, or neither"),
        ({**TARGETS, "prefill_deployment": "p", "decode_deployment": "p"}, "are both 'p'"),
        ({"prefill_deployment": "p", "decode_deployment": "d"}, "set balance, too"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RouterConfig(**settings)
