"""The balance of roles by scaling two Deployments: what an API server is asked, and when nothing is."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import kmock
import pytest
import pytest_asyncio
from kubernetes_double import ApiServer, pod_of
from router_doubles import MODEL, cluster, decode, prefill, until
from test_balance_of_roles import TARGETS, pool_of, told
from test_kubernetes_watch import lead_to

from router.balance.deployments import Deployments
from router.balance.work import Work
from wire.config import Role
from wire.errors import Conflict, Unavailable

P, D = Role.PREFILL, Role.DECODE
NAMES = {P: "kvrelay-prefill", D: "kvrelay-decode"}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The client takes a second or more to import, piece by piece: before any deadline, and not when tests are
    collected."""
    client = importlib.import_module("kubernetes.client")
    importlib.import_module("kubernetes.config")
    for api in (client.CoreV1Api, client.AppsV1Api):
        api(client.ApiClient(client.Configuration()))
    assert client.V1Scale


@pytest_asyncio.fixture
async def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    server.scales = {"kvrelay-prefill": 1, "kvrelay-decode": 3}
    async with server.running():
        lead_to(server, monkeypatch, tmp_path)
        yield server


async def test_one_gets_a_pod_more_and_the_other_one_less_and_it_is_over_when_nodes_are_there(api: ApiServer) -> None:
    pool = pool_of(2, 3)
    pool.miss(pool.nodes[1], "not there yet", 2.0, 2.0)
    way = Deployments(pool, NAMES, "")
    assert way.namespace == "serving"
    assert await way.hindered("m") == ""
    scaling = await way.begin("m", P)
    assert api.scales == {"kvrelay-prefill": 2, "kvrelay-decode": 2}
    assert [verb for verb, _ in api.asked] == ["get"] * 4 + ["put"] * 2
    assert scaling.where == "kvrelay-prefill 1 -> 2, kvrelay-decode 3 -> 2"
    assert await scaling.over() is None
    told(pool, pool.nodes[1], P, at=3.0)
    assert await scaling.over() is None
    pool.miss(pool.nodes[4], "its pod is gone", 3.0, 3.0)
    assert await scaling.over() == ""


async def test_nothing_begins_while_pods_are_missing_or_models_are_several(api: ApiServer) -> None:
    pool = pool_of(1, 2)
    way = Deployments(pool, NAMES, "")
    why = "Deployment kvrelay-decode wants 3 pods, and 2 decode nodes take requests"
    assert await way.hindered("m") == why
    with pytest.raises(Conflict, match=why):
        await way.begin("m", P)
    api.rescale("kvrelay-decode", 2)
    assert await way.hindered("m") == ""
    told(pool, pool.nodes[2], D, at=2.0, model="other")
    assert "one model, and there are nodes of m, other" in await way.hindered("m")
    assert all(verb == "get" for verb, _ in api.asked)


async def test_what_is_not_over_in_time_is_put_back_but_not_what_others_have_changed(api: ApiServer) -> None:
    way = Deployments(pool_of(1, 3), NAMES, "")
    scaling = await way.begin("m", P)
    await scaling.give_up()
    assert api.scales == {"kvrelay-prefill": 1, "kvrelay-decode": 3}
    scaling = await way.begin("m", P)
    api.rescale("kvrelay-decode", 7)
    assert await scaling.over() == "somebody else has scaled Deployment kvrelay-decode to 7"
    await scaling.give_up()
    assert api.scales == {"kvrelay-prefill": 1, "kvrelay-decode": 7}


async def test_of_two_routers_that_decide_at_once_one_is_refused(api: ApiServer) -> None:
    ways = [Deployments(pool_of(1, 3), NAMES, "") for _ in range(2)]
    told_by = await asyncio.gather(*(way.begin("m", P) for way in ways), return_exceptions=True)
    assert api.scales == {"kvrelay-prefill": 2, "kvrelay-decode": 2}
    (refused,) = [each for each in told_by if isinstance(each, Exception)]
    assert isinstance(refused, Unavailable | Conflict)


@pytest.mark.parametrize(
    ("fails", "status", "says"),
    [
        ("get", 403, "the service account must be allowed to get and update deployments/scale"),
        ("put kvrelay-decode", 500, "answers 500 about Deployment kvrelay-decode"),
    ],
)
async def test_an_api_server_that_refuses_is_named_and_leaves_all_as_it_was(
    api: ApiServer, fails: str, status: int, says: str
) -> None:
    way = Deployments(pool_of(1, 3), NAMES, "")
    api.scale_fails = {fails: kmock.KubernetesError(status, "No", "no")}
    with pytest.raises(Unavailable, match=says):
        await way.begin("m", P)
    assert (says in await way.hindered("m")) is (fails == "get")
    assert api.scales == {"kvrelay-prefill": 1, "kvrelay-decode": 3}


async def test_an_api_server_that_is_away_hinders_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = ApiServer()
    server.scales = {"kvrelay-prefill": 1, "kvrelay-decode": 3}
    async with server.running():
        lead_to(server, monkeypatch, tmp_path)
        way = Deployments(pool_of(1, 3), NAMES, "")
        scaling = await way.begin("m", P)
    assert "does not answer" in await way.hindered("m")
    assert await scaling.over() is None
    await scaling.give_up()


async def test_a_router_of_a_cluster_of_pods_scales_its_deployments(api: ApiServer) -> None:
    nodes = [prefill(), decode(), decode(), decode()]
    names = {"prefill_deployment": NAMES[P], "decode_deployment": NAMES[D]}
    async with cluster(*nodes, **TARGETS, **names, kubernetes_selector="app=kvrelay") as c:
        for at, node in enumerate(nodes):
            await api.put(pod_of(f"n{at}", node.url, node.role))
        counted = c.router.counted
        assert counted is not None
        counted.take = lambda: {  # type: ignore[method-assign]
            MODEL: Work(asked=99, asked_tokens=990_000, computed=99, guessed_tokens=990_000, prefill_ms=99_000.0)
        }
        balancer = c.router.lookout.balance.__self__  # type: ignore[attr-defined]
        for _ in range(3):
            await balancer.look()
        assert api.scales == {"kvrelay-prefill": 2, "kvrelay-decode": 2}
        assert not any(node.flips_to for node in nodes)
        (seen,) = balancer.told()
        assert seen.changes[0].where == "kvrelay-prefill 1 -> 2, kvrelay-decode 3 -> 2"
        await until(lambda: all(c.node(node).up for node in nodes))
