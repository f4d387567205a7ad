"""Pods of an API server become nodes, and cease to be, whatever the API server does."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kmock
import pytest
import pytest_asyncio
from kubernetes_double import ApiServer, pod_of
from prometheus_client import CollectorRegistry
from router_doubles import cluster, decode, prefill, until

from kvrelay.router.membership.kubernetes_pods import Pace, follow_pods
from kvrelay.router.nodes.node import HealthReport, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig

P, D = "http://127.0.0.1:8100", "http://127.0.0.1:8200"
NOT_LONGER_S = 5.0
QUICK = Pace(relist_s=0.2, list_deadline_s=0.5, connect_s=0.5, most_back_off_s=0.2)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The client takes a second or more to import: before any deadline, and not when tests are
    collected.
    """
    importlib.import_module("kubernetes.client")


def lead_to(server: ApiServer, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder / "config")))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest_asyncio.fixture
async def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    async with server.running():
        lead_to(server, monkeypatch, tmp_path)
        yield server


@asynccontextmanager
async def following(pace: Pace = QUICK, **config: Any) -> AsyncIterator[Pool]:
    pool = Pool([], [])
    async with follow_pods(
        pool, "app=kvrelay", config.get("namespace", ""), CollectorRegistry(), pace
    ):
        yield pool


def urls(pool: Pool) -> list[str]:
    return sorted(node.url for node in pool.nodes)


async def test_pods_come_change_and_go(api: ApiServer) -> None:
    api.put(pod_of("p", P, "prefill"))
    api.put(pod_of("stranger", "http://127.0.0.1:1", "prefill", app="other"))
    api.put(pod_of("d", D, "decode", ready=False))
    async with following() as pool:
        await until(lambda: urls(pool) == [P])
        api.put(pod_of("d", D, "decode"))
        await until(lambda: urls(pool) == [P, D])
        assert {node.url: node.role for node in pool.nodes} == {P: Role.PREFILL, D: Role.DECODE}
        api.put(pod_of("p", P, "prefill", ready=False))
        await until(lambda: urls(pool) == [D])
        api.delete("d")
        await until(lambda: urls(pool) == [])
    assert {verb for verb, _ in api.asked} == {"list"}
    first, *later = [params for _, params in api.asked]
    assert "resourceVersion" not in first  # as it is now
    assert all(
        params["resourceVersionMatch"] == "NotOlderThan" and "limit" not in params
        for params in later
    )


async def test_it_asks_again_after_a_pause(api: ApiServer) -> None:
    api.put(pod_of("p", P, "prefill"))
    async with following() as pool:
        await until(lambda: urls(pool) == [P])
        began, lists = time.monotonic(), api.count("list")
        await until(lambda: api.count("list") >= lists + 3)
        assert time.monotonic() - began >= 2 * QUICK.relist_s


async def test_a_list_in_pages_is_read_whole(api: ApiServer) -> None:
    api.page = 2
    for number in range(5):
        api.put(pod_of(f"d{number}", f"http://127.0.0.1:{8200 + number}", "decode"))
    async with following() as pool:
        await until(lambda: len(pool.nodes) == 5)


@pytest.mark.parametrize("how", ["page", "version of another server"])
async def test_versions_that_are_gone_are_listed_anew(api: ApiServer, how: str) -> None:
    api.page = 1
    api.pages_expire = how == "page"
    api.put(pod_of("d", D, "decode"))
    api.put(pod_of("p", P, "prefill"))
    async with following() as pool:
        if how == "page":
            await until(lambda: api.count("list") >= 4)
            api.pages_expire = False
        await until(lambda: urls(pool) == [P, D])
        api.delete("p")
        api.version = 3
        await until(lambda: urls(pool) == [D])


async def test_a_restarted_api_server_takes_no_node_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = (
        ApiServer(),
        ApiServer(),
    )  # the second one's versions are older than those of the first
    first.version = 7000
    tries = 0

    def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        writer.transport.abort()

    async with contextlib.AsyncExitStack() as life:
        await life.enter_async_context(first.running())
        lead_to(first, monkeypatch, tmp_path)
        port = int(first.url.rpartition(":")[2])
        first.put(pod_of("p", P, "prefill"))
        async with following() as pool:
            await until(lambda: urls(pool) == [P])
            await life.aclose()
            async with await asyncio.start_server(cut, "127.0.0.1", port):
                await until(lambda: tries >= 3)
            assert urls(pool) == [P]
            second.put(pod_of("d", D, "decode"))
            async with second.running(port):
                await until(lambda: urls(pool) == [D])


async def test_a_slow_list_is_waited_for_and_one_too_slow_tried_again(api: ApiServer) -> None:
    api.put(pod_of("p", P, "prefill"))
    async with following() as pool:
        await until(lambda: urls(pool) == [P])
        api.delete("p")
        api.list_takes_s = 0.2
        await until(lambda: urls(pool) == [])
        api.list_takes_s = 1.0
        api.put(pod_of("d", D, "decode"))
        lists = api.count("list")
        await until(lambda: api.count("list") >= lists + 2)
        assert urls(pool) == []
        api.list_takes_s = 0.0
        await until(lambda: urls(pool) == [D])


async def test_what_may_not_be_read_is_said_and_kept_asking(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(namespace="another") as pool:
        await until(lambda: api.count("list") >= 2)
        assert not pool.nodes
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "403" in said
    assert "must be allowed to list pods" in said


async def test_it_ends_though_the_api_server_is_silent(api: ApiServer) -> None:
    api.put(pod_of("p", P, "prefill"))
    async with following(Pace(relist_s=0.2)) as pool:
        await until(lambda: urls(pool) == [P])
        api.list_takes_s = 2.0
        lists = api.count("list")
        await until(lambda: api.count("list") > lists)
        began = time.monotonic()
    assert time.monotonic() - began < 1.5
    api.put(pod_of("d", D, "decode"))
    assert urls(pool) == [P]


async def test_no_zombie_gets_requests_for_longer_than_five_seconds(api: ApiServer) -> None:
    """The worst one: who has its address now answers every health check as it did."""
    async with prefill().running() as p, decode().running() as d, decode().running() as zombie:
        for name, node in (("p", p), ("d", d), ("z", zombie)):
            api.put(pod_of(name, node.url, node.role))
        async with cluster(
            ready=False, kubernetes_selector="app=kvrelay", decode_policy="round_robin"
        ) as c:
            await until(
                lambda: len(c.router.pool.up(Role.DECODE)) == 2 and c.router.pool.up(Role.PREFILL)
            )
            await c.text()
            await c.text()
            assert zombie.calls
            api.delete("z")
            began = time.monotonic()
            await until(lambda: c.router.pool.find(zombie.url) is None, NOT_LONGER_S)
            assert time.monotonic() - began < NOT_LONGER_S
            calls = len(zombie.calls)
            for _ in range(4):
                assert await c.text()
            assert len(zombie.calls) == calls
            assert c.metric("kvrelay_router_kubernetes_listed_timestamp_seconds") > time.time() - 60


async def test_without_an_api_server_health_finds_the_dead_and_the_replaced(api: ApiServer) -> None:
    nodes = {"p": prefill(), "d": decode(), "other": decode(), "dead": decode()}
    async with contextlib.AsyncExitStack() as stack:
        for name, node in nodes.items():
            await stack.enter_async_context(node.running())
            api.put(pod_of(name, node.url, node.role))
        c = await stack.enter_async_context(cluster(ready=False, kubernetes_selector="app=kvrelay"))
        pool = c.router.pool
        await until(lambda: len(pool.up(Role.DECODE)) == 3 and bool(pool.up(Role.PREFILL)))
        api.list_fails = kmock.KubernetesError(500, "InternalError", "etcd")
        nodes["other"].pod_uid = "another pod"
        nodes["dead"].health_hangs = True
        await until(
            lambda: [node.url for node in pool.up(Role.DECODE)] == [nodes["d"].url], NOT_LONGER_S
        )
        assert "another pod" in c.node(nodes["other"]).reason
        assert await c.text()


def told(pool: Pool, url: str, **fields: Any) -> Node:
    node = pool.find(url)
    assert node is not None
    report = {"role": Role.PREFILL, "model": "m", "generation": "g", "pod_uid": "uid-p", **fields}
    pool.note_report(node, HealthReport(**report), 5.0, 5.0)
    return node


async def test_who_is_not_what_the_pod_says_takes_no_legs(api: ApiServer) -> None:
    api.put(pod_of("p", P, "prefill", **{"kvrelay/model": "m"}))
    async with following() as pool:
        await until(lambda: urls(pool) == [P])
        assert told(pool, P).up
        assert told(pool, P, pod_uid="").up  # it need not know
        for wrong in ({"pod_uid": "uid-q"}, {"model": "n"}, {"role": Role.DECODE}):
            assert not told(pool, P, **wrong).up
        assert told(pool, P).up


async def test_without_a_client_or_a_cluster_the_router_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        async with following():
            pass
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "kubernetes.client", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'kvrelay\[kubernetes\]'"):
        async with following():
            pass


async def test_in_a_pod_its_service_account_leads_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubernetes.config import incluster_config

    from kvrelay.router.membership import kubernetes_pods

    for name, text in (("token", "t0k3n"), ("ca.crt", "a certificate"), ("namespace", "mine\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(kubernetes_pods, "_OWN_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert kubernetes_pods.kubernetes_client("")[1] == "mine"
    assert kubernetes_pods.kubernetes_client("")[0].host == "https://[fd00::1]:443"
    assert kubernetes_pods.kubernetes_client("theirs")[1] == "theirs"


def test_a_namespace_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="kubernetes_selector"):
        RouterConfig(kubernetes_namespace="serving")
    with pytest.raises(ConfigError, match="namespace"):
        RouterConfig(kubernetes_selector="app=kvrelay", kubernetes_namespace="../nodes")
