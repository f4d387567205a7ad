"""Which nodes follow from pods, and how they come and go, whatever the API server does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kubernetes_double import ApiServer, pod_of
from prometheus_client import CollectorRegistry
from router_doubles import cluster, decode, prefill, until

from kvrelay.router.membership import kubernetes_pods
from kvrelay.router.membership.kubernetes_pods import api_server, follow_pods, nodes_of
from kvrelay.router.nodes.node import NodeSpec
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError
from tests.cluster.certificates import authority

P, D = "http://127.0.0.1:8100", "http://127.0.0.1:8200"


def pod(changes: dict[str, Any] | None = None, url: str = P, **fields: Any) -> dict[str, Any]:
    """A pod of a prefill node; `changes` are by dotted path."""
    made = pod_of(fields.pop("name", "p"), url, "prefill", **fields)
    for path, value in (changes or {}).items():
        inner = made
        *way, last = path.split("|")
        for step in way:
            inner = inner[step]
        inner[last] = value
    return made


@pytest.mark.parametrize("url", [P, "http://[fd00::1]:8100"])
def test_a_pod_is_a_node_by_its_label_its_port_and_its_uid(url: str) -> None:
    assert nodes_of([pod(url=url)]) == {url: NodeSpec(url, Role.PREFILL, "uid-p")}


@pytest.mark.parametrize(
    "changes",
    [
        {"status|conditions": [{"type": "Ready", "status": "False"}]},
        {"status|conditions": [{"type": "Ready", "status": "Unknown"}]},
        {"status|conditions": None},
        {"metadata|deletionTimestamp": "2026-01-01T00:00:30Z"},
        {"status|phase": "Failed"},
        {"status|phase": "Succeeded"},
        {"status": None, "spec": None, "metadata|labels": None},
    ],
)
def test_only_pods_that_are_ready_and_stay_are_nodes(changes: dict[str, Any]) -> None:
    assert nodes_of([pod(changes)]) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"metadata|labels": {"kvrelay/role": "both"}},
            "kvrelay/role must be prefill or decode, got 'both'",
        ),
        ({"spec|containers": [{"name": "node"}]}, "container port named http"),
        ({"spec|containers": None}, "container port named http"),
        (
            {"spec|containers": [{"ports": [{"name": "http", "containerPort": 70000}]}]},
            "node address",
        ),
        ({"status|podIP": None}, "no address"),
        ({"status|podIP": "not an address"}, "node address"),
    ],
)
def test_a_pod_that_cannot_be_a_node_is_complained_of_and_harms_no_other(
    changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    kubernetes_pods._complain.cache_clear()
    for _ in range(2):
        assert list(nodes_of([pod(changes, name="wrong"), pod()])) == [P]
    assert len(caplog.messages) == 1
    assert said in caplog.text


def test_an_address_belongs_to_the_younger_pod() -> None:
    younger = pod({"metadata|creationTimestamp": "2026-01-02T00:00:00Z"}, uid="b", name="p2")
    for listed in ([younger, pod()], [pod(), younger]):
        assert [node.generation for node in nodes_of(listed).values()] == ["b"]


# Lists.


@pytest_asyncio.fixture
async def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ApiServer]:
    monkeypatch.setattr(kubernetes_pods, "RELIST_S", 0.2)
    monkeypatch.setattr(kubernetes_pods, "DEADLINES_S", (60.0, 60.0))
    monkeypatch.setattr(kubernetes_pods, "ACCOUNT", tmp_path / "account")
    async with ApiServer().running(tmp_path / "account") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


@asynccontextmanager
async def following() -> AsyncIterator[Pool]:
    pool = Pool([], [])
    async with follow_pods(pool, "app=kvrelay", "", CollectorRegistry()):
        yield pool


def urls(pool: Pool) -> list[str]:
    return sorted(node.url for node in pool.nodes)


async def test_pods_come_change_and_go(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    api.put(pod_of("p", P, "prefill"))
    api.put(pod_of("stranger", "http://127.0.0.1:1", "prefill", app="other"))
    api.put(pod_of("d", D, "decode", ready=False))
    api.put(pod_of("odd", D, "both"))
    async with following() as pool:
        await until(lambda: urls(pool) == [P])
        api.put(pod_of("d", D, "decode"))
        began, lists = time.monotonic(), api.lists
        await until(lambda: urls(pool) == [P, D])
        assert {node.url: node.role for node in pool.nodes} == {P: Role.PREFILL, D: Role.DECODE}
        await until(lambda: api.lists >= lists + 3)
        assert time.monotonic() - began >= 2 * kubernetes_pods.RELIST_S, "it pauses"
        api.put(pod_of("p", P, "prefill", ready=False))
        await until(lambda: urls(pool) == [D])
        api.delete("d")
        await until(lambda: urls(pool) == [])
    assert sum("pod odd cannot be a node" in line for line in caplog.messages) == 1


async def test_an_api_server_that_is_slow_or_fails_takes_no_node_down(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_pods, "DEADLINES_S", (60.0, 0.5))
    api.put(pod_of("p", P, "prefill"))
    async with following() as pool:
        await until(lambda: urls(pool) == [P])
        api.delete("p")
        api.put(pod_of("d", D, "decode"))
        for api.list_takes_s, api.list_fails in ((60.0, 0), (0.0, 500), (0.0, 307)):
            lists, began = api.lists, time.monotonic()
            await until(lambda lists=lists: api.lists >= lists + 3)
            assert urls(pool) == [P]
            assert time.monotonic() - began > 1.5 * kubernetes_pods.RELIST_S, "it was redirected"
        api.list_fails = 0
        await until(lambda: urls(pool) == [D])


async def test_it_ends_though_the_api_server_is_silent(api: ApiServer) -> None:
    async with asyncio.timeout(30), following() as pool:
        await until(lambda: api.lists > 0)
        api.list_takes_s = 60.0
        lists = api.lists
        await until(lambda: api.lists > lists)
    assert not pool.nodes


async def test_without_an_api_server_health_finds_the_dead_and_the_replaced(api: ApiServer) -> None:
    nodes = {"p": prefill(), "d": decode(), "other": decode(), "dead": decode()}
    async with contextlib.AsyncExitStack() as stack:
        for name, node in nodes.items():
            await stack.enter_async_context(node.running())
            api.put(pod_of(name, node.url, node.role))
        c = await stack.enter_async_context(
            cluster(ready=False, kubernetes_selector="app=kvrelay", health_deadline_s=0.5)
        )
        pool = c.router.pool
        await until(lambda: len(pool.up(Role.DECODE)) == 3 and bool(pool.up(Role.PREFILL)))
        api.list_fails = 500
        nodes["other"].pod_uid = "another pod"
        nodes["dead"].health_hangs = True
        await until(lambda: [node.url for node in pool.up(Role.DECODE)] == [nodes["d"].url])
        assert "another pod" in c.node(nodes["other"]).reason
        assert await c.text()


async def test_a_new_token_is_sent_and_a_wrong_one_is_said(
    api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    token = kubernetes_pods.ACCOUNT / "token"
    token.write_text("old")
    api.put(pod_of("p", P, "prefill"))
    async with following() as pool:
        await until(lambda: api.lists >= 3)
        (said,) = (each for each in caplog.messages if "must be allowed to list" in each)
        assert "ClientResponseError: 401" in said
        token.write_text("secret")
        await until(lambda: urls(pool) == [P])


async def test_an_api_server_that_another_authority_vouches_for_is_told_no_token(
    api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    (authority(tmp_path / "other") / "ca.pem").rename(kubernetes_pods.ACCOUNT / "ca.crt")
    async with following():
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
    assert api.lists == 0


async def test_outside_of_a_pod_the_router_says_what_to_do(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for given, namespace in (("", "serving"), ("theirs", "theirs")):
        url, _ = api_server(given)
        assert url == f"https://[fd00::1]:443/api/v1/namespaces/{namespace}/pods"
    (kubernetes_pods.ACCOUNT / "ca.crt").unlink()
    with pytest.raises(ConfigError, match="in a pod with a service account"):
        api_server("")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ConfigError, match="in a pod with a service account"):
        api_server("theirs")
