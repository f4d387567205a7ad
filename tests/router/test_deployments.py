"""The balance of roles by scaling two Deployments: what an API server is asked, and when nothing is."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import kmock
import pytest
import pytest_asyncio
from kubernetes_double import ApiServer, pod_of
from router_doubles import MODEL, cluster, decode, prefill, until
from test_balance_of_roles import TARGETS, busy, pool_of, told
from test_kubernetes_watch import lead_to

from router.balance import deployments
from router.balance.deployments import Deployments
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


async def test_what_was_scaled_in_vain_is_not_tried_again_for_long(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try ends a pod that has work."""
    pool, now = pool_of(1, 3), [1000.0]
    monkeypatch.setattr(deployments, "time", SimpleNamespace(monotonic=lambda: now[0]))
    way = Deployments(pool, NAMES, "")
    for hours in (1, 2, 4):
        assert await way.hindered("m") == ""
        await (await way.begin("m", P)).give_up()
        assert (
            await way.hindered("m")
            == f"Deployments were scaled in vain: nothing is scaled for another {hours * 60} min"
        )
        now[0] += hours * 3600.0 - 1
        assert "another 0 min" in await way.hindered("m")
        now[0] += 2
    scaling = await way.begin("m", D)
    told(pool, pool.nodes[0], D, at=3.0, flips=1)
    assert await scaling.over() == ""
    told(pool, pool.nodes[0], P, at=4.0, flips=2)
    api.scales = {"kvrelay-prefill": 1, "kvrelay-decode": 3}
    await (await way.begin("m", P)).give_up()
    assert "another 60 min" in await way.hindered("m")


async def test_what_cannot_be_put_back_is_tried_again_until_it_is(api: ApiServer) -> None:
    way = Deployments(pool_of(1, 3), NAMES, "")
    scaling = await way.begin("m", P)
    api.scale_fails = {"put": kmock.KubernetesError(500, "No", "no")}
    await scaling.give_up()
    assert api.scales == {"kvrelay-prefill": 2, "kvrelay-decode": 2}
    assert await way.hindered("m") == "Deployments are still to be put back to 3 decode, 1 prefill"
    api.scale_fails = {"put kvrelay-prefill": api.scale_fails["put"]}
    assert "still" in await way.hindered("m")
    assert api.scales == {"kvrelay-prefill": 2, "kvrelay-decode": 3}  # a pod too many rather than one too few
    api.scale_fails = {}
    assert "in vain" in await way.hindered("m")
    assert api.scales == {"kvrelay-prefill": 1, "kvrelay-decode": 3}


@pytest.mark.parametrize("lost", NAMES.values())
async def test_a_write_whose_answer_is_lost_is_taken_back(api: ApiServer, lost: str) -> None:
    way = Deployments(pool_of(1, 3), NAMES, "")
    api.scale_answers_lost = {lost}
    with pytest.raises(Unavailable, match=f"answers 504 about Deployment {lost}"):
        await way.begin("m", P)
    assert api.scales == {"kvrelay-prefill": 1, "kvrelay-decode": 3}
    assert await way.hindered("m") == ""


async def test_a_deployment_without_pods_gets_its_first(api: ApiServer) -> None:
    """On the wire its number is left out."""
    api.scales = {"kvrelay-prefill": 0, "kvrelay-decode": 3}
    way = Deployments(pool_of(0, 3), NAMES, "")
    scaling = await way.begin("m", P)
    assert api.scales == {"kvrelay-prefill": 1, "kvrelay-decode": 2}
    await scaling.give_up()
    assert api.scales == {"kvrelay-prefill": 0, "kvrelay-decode": 3}


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
            MODEL: busy(99, 10_000)
        }
        balancer = c.router.lookout.balance.__self__  # type: ignore[attr-defined]
        for _ in range(3):
            await balancer.look()
        assert api.scales == {"kvrelay-prefill": 2, "kvrelay-decode": 2}
        assert not any(node.flips_to for node in nodes)
        (seen,) = balancer.told()
        assert seen.changes[0].where == "kvrelay-prefill 1 -> 2, kvrelay-decode 3 -> 2"
        await until(lambda: all(c.node(node).up for node in nodes))
