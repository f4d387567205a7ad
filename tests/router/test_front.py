"""What is before the routes: pages of other origins in a browser, the path of a proxy, and where
the console is.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from router_doubles import OPERATOR, STREAMS, Cluster, cluster, decode, prefill
from starlette.testclient import TestClient

from kvrelay.node.app import create_app as create_node
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Node
from kvrelay.settings import merge, settings_of
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig

PAGE = "https://chat.example"
ALLOW = "access-control-allow-origin"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def asked(
    c: Cluster, method: str, path: str, origin: str = PAGE, **more: Any
) -> tuple[int, Any, bytes]:
    headers = {"origin": origin, **more.pop("headers", {})}
    answer = await c.ask(method, path, headers=headers, **more)
    return answer.status, answer.headers, answer.body


@STREAMS
async def test_a_page_of_an_allowed_origin_reads_answers_and_errors(stream: bool) -> None:
    async with cluster(prefill(), decode(), allowed_origins=(PAGE, "https://b"), api_key="k") as c:
        key = {"authorization": "Bearer k"}
        for path in ("/v1/chat/completions", "/v1/models", "/v1/models/nothing"):
            method, body = ("POST", {**CHAT, "stream": stream}) if "chat" in path else ("GET", None)
            for headers in (key, {}):
                status, told, _ = await asked(c, method, path, json=body, headers=headers)
                assert status == (401 if not headers else 404 if "nothing" in path else 200)
                assert told.getall(ALLOW) == [PAGE], path
                assert "Origin" in told.getall("vary"), path
        _, told, body = await asked(
            c, "POST", "/v1/chat/completions", json={**CHAT, "stream": stream}, headers=key
        )
        assert (b"[DONE]" in body) is stream

        # Of another page the browser learns that it may not read the answer; who is no page is told
        # nothing of it.
        _, told, _ = await asked(
            c, "POST", "/v1/chat/completions", "https://evil", json=CHAT, headers=key
        )
        assert ALLOW not in told
        assert not {ALLOW, "vary"} & {name.lower() for name in (await c.asked(headers=key)).headers}


async def test_a_browser_that_asks_first_needs_no_key() -> None:
    wants = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-own",
    }
    async with cluster(
        ready=False, allowed_origins=(PAGE,), allowed_methods=("POST",), api_key="k"
    ) as c:
        for path in ("/v1/chat/completions", "/v1/responses"):
            status, told, _ = await asked(c, "OPTIONS", path, headers=wants)
            assert (status, told[ALLOW], told["access-control-allow-methods"]) == (
                200,
                PAGE,
                "POST",
            )
            assert told["access-control-allow-headers"] == "authorization,x-own"
            assert "access-control-allow-credentials" not in told
            status, told, _ = await asked(c, "OPTIONS", path, "https://evil", headers=wants)
            assert (status, ALLOW in told) == (400, False)
        put = wants | {"access-control-request-method": "PUT"}
        assert (await asked(c, "OPTIONS", "/v1/responses", headers=put))[0] == 400


async def test_no_page_of_another_origin_may_read_anything_unless_it_is_allowed() -> None:
    async with cluster(prefill(), decode()) as c:
        status, told, _ = await asked(c, "POST", "/v1/chat/completions", json=CHAT)
        assert (status, ALLOW in told) == (200, False)
        wants = {"access-control-request-method": "POST"}
        status, told, _ = await asked(c, "OPTIONS", "/v1/chat/completions", headers=wants)
        assert (status, ALLOW in told) == (405, False)


async def test_requests_come_with_the_path_of_a_proxy_or_without_it() -> None:
    async with cluster(prefill(), decode(), root_path="/llm/a", api_key="k") as c:
        key = {"authorization": "Bearer k"}
        for root in ("", "/llm/a"):
            for headers in (key, {}):
                status = 200 if headers else 401
                assert (await asked(c, "GET", f"{root}/v1/models", headers=headers))[0] == status
                assert (
                    await asked(
                        c, "POST", f"{root}/v1/chat/completions", json=CHAT, headers=headers
                    )
                )[0] == status
            assert (await asked(c, "GET", f"{root}/admin/nodes"))[0] == 401
            assert (await asked(c, "GET", f"{root}/admin/nodes", headers=OPERATOR))[0] == 200
            status, told, _ = await asked(c, "GET", f"{root}/")
            assert (status, told["location"]) == (307, "/llm/a/console")
        assert (await asked(c, "GET", "/llm/a/console"))[0] == 200
        assert (await asked(c, "GET", "/llm/a/console/main.js"))[0] == 200
        assert (await asked(c, "GET", "/llm/a"))[0] == 307
        assert (await asked(c, "GET", "/llm/ab/v1/models", headers=key))[0] == 404
        assert (await asked(c, "GET", "/llm/a/llm/a/v1/models", headers=key))[0] == 404
        _, _, document = await asked(c, "GET", "/llm/a/openapi.json")
        assert b'"servers":[{"url":"/llm/a"}]' in document


def test_a_node_has_the_same_front() -> None:
    config = NodeConfig(
        EngineConfig("nowhere"), api_key="k", allowed_origins=(PAGE,), root_path="/n"
    )
    app = create_node(
        Node(config, EngineClient(config), created=0), lambda _: contextlib.AsyncExitStack()
    )
    client = TestClient(app)
    told = client.get("/n/v1/models", headers={"origin": PAGE})
    assert (told.status_code, told.headers[ALLOW]) == (401, PAGE)
    assert ALLOW not in client.get("/version", headers={"origin": "https://evil"}).headers
    wants = {"origin": PAGE, "access-control-request-method": "POST"}
    assert client.options("/n/v1/chat/completions", headers=wants).headers[ALLOW] == PAGE


@pytest.mark.parametrize("given", [['["a","b"]'], ["a", "b"], ['["a"]', "b"]])
def test_a_list_is_given_as_json_or_one_by_one(given: list[str]) -> None:
    known = settings_of(RouterConfig)
    assert merge(known, {"allowed_origins": given}, None) == {"allowed_origins": ("a", "b")}
    for wrong in (['["a",1]'], 5):
        with pytest.raises(ConfigError, match="--allowed-origins must be a list of texts"):
            merge(known, {"allowed_origins": wrong}, None)
