"""Who may operate the router: nobody without the admin key, from wherever he comes."""

from __future__ import annotations

import pytest
from router_doubles import OPERATOR, Cluster, cluster, decode, prefill

from kvrelay.router.guard import OPERATED
from kvrelay.router.serve import RouterApp
from kvrelay.wire.router_config import RouterConfig


def operated() -> list[tuple[str, str]]:
    """Method and path of every route that an operator has."""
    routes = [
        route for route in RouterApp(RouterConfig()).routes if route.path.startswith(OPERATED)
    ]  # type: ignore[attr-defined]
    return sorted((method, route.path) for route in routes for method in route.methods)  # type: ignore[attr-defined]


ROUTES = operated()


def test_these_are_the_routes_of_operators() -> None:
    assert ROUTES == [
        ("GET", "/admin/nodes"),
        ("GET", "/console/state"),
        ("POST", "/admin/drain"),
        ("POST", "/admin/nodes/role"),
        ("POST", "/admin/reload"),
        ("POST", "/admin/undrain"),
        ("POST", "/reset_prefix_cache"),
    ]


async def statuses(c: Cluster, url: str, headers: dict[str, str]) -> dict[tuple[str, str], int]:
    told = {}
    for method, path in ROUTES:
        async with c.http.request(
            method, url + path, headers=headers, json={"url": "http://127.0.0.1:9"}
        ) as answer:
            told[method, path] = answer.status
            if answer.status == 401:
                assert (await answer.json())["error"]["type"] == "authentication_error"
    return told


@pytest.mark.parametrize("key", ["", "operator"])
async def test_every_route_wants_the_key_from_loopback_too_whatever_the_headers_say(
    key: str,
) -> None:
    d = decode()
    async with cluster(prefill(), d, admin_key=key, api_key="client") as c:
        for headers in (
            {},
            {"host": "localhost"},
            {"authorization": "Bearer client"},
            {"authorization": "Bearer "},
            {"origin": c.url, "sec-fetch-site": "same-origin"},
        ):
            assert set((await statuses(c, c.url, headers)).values()) == {401}, headers
        assert len(c.router.pool.nodes) == 2


async def test_who_has_the_key_needs_nothing_else() -> None:
    async with cluster(prefill(), decode()) as c:
        elsewhere = {
            "origin": "http://elsewhere",
            "host": "router.example:8000",
            "x-forwarded-for": "10.0.0.1",
        }
        told = await statuses(c, c.url, elsewhere | OPERATOR)
        assert 401 not in told.values()


async def test_the_key_is_asked_for_before_there_is_a_route() -> None:
    async with cluster() as c:
        for method, path in (
            ("GET", "/admin"),
            ("GET", "/admin/none"),
            ("OPTIONS", "/admin/nodes"),
            ("PUT", "/admin/"),
        ):
            assert (await c.ask(method, path)).status == 401
        async with c.http.get(f"{c.url}/console") as answer:  # the page itself holds nothing
            assert answer.status == 200
