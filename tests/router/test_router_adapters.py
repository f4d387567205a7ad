"""Adapters at the router: who is asked, which names are known, and how both legs find nodes that
have one.
"""

from __future__ import annotations

import pytest
from router_doubles import MODEL, cluster, decode, prefill

from kvrelay.router.nodes.node import HealthReport
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "x", "lora_path": "/adapters/x"}


async def test_the_legs_of_an_adapters_request_go_to_nodes_that_have_it() -> None:
    with_it = [prefill(adapters=["x"]), decode(adapters=["x"])]
    without = [prefill(), decode()]
    async with cluster(*with_it, *without) as c:
        for _ in range(6):
            await c.text({"model": "x"})
        assert [len(node.calls) for node in (*with_it, *without)] == [6, 6, 0, 0]
        assert with_it[1].calls[0].body["model"] == "x"
        assert (await c.ask("GET", "/v1/models/x")).json["parent"] == MODEL
        answer = await c.asked({"model": "y"})
        assert answer.status == 404
        assert "'x'" in answer.error["message"]


@pytest.mark.parametrize(
    ("statuses", "status"), [((400, 400), 400), ((404, 404), 404), ((200, 400), 502)]
)
async def test_what_the_nodes_refuse_is_told_with_all_their_words(
    statuses: tuple[int, int], status: int
) -> None:
    p, d = prefill(adapter_status=statuses[0]), decode(adapter_status=statuses[1])
    async with cluster(p, d) as c, c.http.post(c.url + LOAD, json=BODY) as answer:
        assert answer.status == status
        message = (await answer.json())["error"]["message"]
        assert f"decode node {d.url} ({statuses[1]}): it will not" in message
        assert f"prefill node {p.url}" in message


def test_an_older_health_report_does_not_undo_what_a_node_has_just_said() -> None:
    pool = Pool(["http://p"], [])
    (node,) = pool.nodes

    def report(*adapters: str, started: float) -> None:
        health = HealthReport(Role.PREFILL, "m", generation="g", adapters=list(adapters))
        pool.note_report(node, health, started=started, now=started + 0.5)

    report("a", started=1.0)
    pool.note_adapters(node, {*node.adapters, "b"}, 2.2)
    report("a", started=2.0)
    assert node.adapters == {"a", "b"}
    report("b", started=3.0)
    assert node.adapters == {"b"}
    pool.note_adapters(node, node.adapters - {"b"}, 4.0)
    assert pool.adapters() == {}
    assert not pool.up(Role.PREFILL, model="b")
    assert "no prefill node that is up has 'b'" in pool.no_node(Role.PREFILL, "b").message
