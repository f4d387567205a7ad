"""Several models behind one router: groups of nodes, names, aliases."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import pytest
from router_doubles import MODEL, Cluster, cluster, decode, prefill, until

from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig


async def said(c: Cluster, path: str) -> Any:
    async with c.http.get(c.url + path) as answer:
        return await answer.json()


async def asked(c: Cluster, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with c.http.post(c.url + path, json=body) as answer:
        return answer.status, await answer.json()


async def test_requests_go_to_the_nodes_of_their_model_and_aliases_stand_for_names() -> None:
    small, other = (
        [prefill(), decode(adapters=["x"])],
        [prefill(model="other"), decode(model="other")],
    )
    small[0].adapters = ["x"]
    async with cluster(*small, *other, alias=("gpt=other", "mine=x", "lost=nothing")) as c:
        for name, expected in (("other", "other"), ("gpt", "other"), (MODEL, MODEL), ("mine", "x")):
            await c.text({"model": name})
            group = other if expected == "other" else small
            assert [node.calls[-1].body["model"] for node in group] == [expected] * 2
        assert [len(node.calls) for node in (*small, *other)] == [2, 2, 2, 2]
        cards = (await said(c, "/v1/models"))["data"]
        assert [(card["id"], card.get("parent"), card.get("root")) for card in cards] == [
            ("other", None, None),
            (MODEL, None, None),
            ("x", MODEL, None),
            ("gpt", None, "other"),
            ("mine", MODEL, "x"),
        ]
        assert (await said(c, "/v1/models/gpt"))["root"] == "other"
        client = anthropic.AsyncAnthropic(base_url=c.url, api_key="key", max_retries=0, timeout=10)
        page = await client.models.list()
        assert abs(page.data[0].created_at.timestamp() - time.time()) < 600
        assert (page.first_id, page.last_id, page.has_more) == ("other", "mine", False)
        assert (await client.models.retrieve("gpt")).display_name == "gpt"
        assert (await c.asked({"model": "lost"})).status == 503
        answer = await c.asked({"model": "unknown"})
        assert answer.status == 404
        assert "'gpt'" in answer.error["message"]


async def test_readiness_is_told_by_model_and_one_model_that_is_ready_is_enough() -> None:
    nodes = [prefill(), decode(), prefill(model="other"), decode(model="other")]
    async with cluster(*nodes) as c:
        assert (await said(c, "/health"))["models"] == {"other": True, MODEL: True}
        nodes[3].health_status = 503
        await until(lambda: not c.node(nodes[3]).up)
        seen = await said(c, "/health")
        assert (seen["models"], seen["decode"]) == (
            {"other": False, MODEL: True},
            {"up": 1, "listed": 2},
        )
        await c.text()
        answer = await c.asked({"model": "other"})
        assert answer.status == 503
        assert "no decode node that is up has 'other'" in answer.error["message"]


async def test_tokenize_asks_a_node_of_the_model_by_its_own_name() -> None:
    nodes = [prefill(), decode(), prefill(model="other"), decode(model="other")]
    async with cluster(*nodes, alias=("gpt=other",)) as c:
        assert (await asked(c, "/tokenize", {"model": "gpt", "prompt": "a"}))[0] == 200
        (body,) = nodes[2].asked
        assert json.loads(body)["model"] == "other"
        assert (await asked(c, "/tokenize", {"model": "no", "prompt": "a"}))[0] == 404
        status, told = await asked(c, "/tokenize", {"prompt": "a"})
        assert (status, told["error"]["param"]) == (400, "model")
        assert f"'other', '{MODEL}'" in told["error"]["message"]
        nodes[2].health_status = 503
        await until(lambda: not c.node(nodes[2]).up)
        assert (await asked(c, "/tokenize", {"model": "gpt", "prompt": "a"}))[0] == 200
        assert len(nodes[3].asked) == 1


async def test_an_adapter_is_loaded_on_the_nodes_of_the_model_that_the_body_names() -> None:
    nodes = [prefill(), decode(), prefill(model="other"), decode(model="other")]
    async with cluster(*nodes, health_interval_s=5) as c:  # the doubles report no adapters
        body = {"lora_name": "x", "lora_path": "/x"}
        status, told = await asked(c, "/v1/load_lora_adapter", body)
        assert (status, told["error"]["param"]) == (400, "base_model_name")
        assert (await asked(c, "/v1/load_lora_adapter", body | {"base_model_name": "no"}))[0] == 404
        for node in nodes[2:]:
            node.adapters = ["x"]  # as their health will say
        status, told = await asked(c, "/v1/load_lora_adapter", body | {"base_model_name": "other"})
        assert (status, len(told["nodes"])) == (200, 2)
        assert (await asked(c, "/v1/unload_lora_adapter", {"lora_name": "x"}))[0] == 200
        assert [len(node.told) for node in nodes] == [0, 0, 2, 2]


@pytest.mark.parametrize("alias", [("a",), ("=m",), ("a=",), ("a=m", "a=n"), ("a=b", "b=m")])
def test_an_alias_that_makes_no_sense_is_refused(alias: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="alias"):
        RouterConfig(alias=alias)
