"""Admission in a router over fake nodes: who waits, who is refused, and what is given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from router_doubles import (
    MODEL,
    WHOLE,
    Call,
    Cluster,
    cluster,
    cut,
    decode,
    decode_ok,
    handover,
    prefill,
    until,
)

from kvrelay.router.admission.controller import _LOOK_S, AdmissionController
from kvrelay.router.admission.keys import ANYONE, Caller, hash_of
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import KeyConfig, RouterConfig
from kvrelay.wire.step_costs import StepCosts

ROOM = Load(free_blocks=100, total_blocks=100, block_size=16, legs=1)
FULL = Load(free_blocks=0, total_blocks=100, block_size=16, legs=1)
COSTS = StepCosts(8.0, 0.1, 0.0, 0.0, 0.04, 0.0)
ALICE, BOB = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}


def keys(**alice: Any) -> tuple[KeyConfig, ...]:
    return (KeyConfig("alice", hash_of("a"), **alice), KeyConfig("bob", hash_of("b")))


async def asked(
    c: Cluster, body: dict[str, Any] | None = None, **kwargs: Any
) -> tuple[int, Any, Any]:
    async with c.post(body, **kwargs) as answer:
        return answer.status, await answer.json(), answer.headers


class Busy:
    """A cluster with no room for another request: one is under way, whose decode node holds it."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)
        self.p, self.d = prefill(), decode(self.held, load=ROOM)
        self.tasks: list[asyncio.Task[Any]] = []

    async def held(self, call: Call) -> None:
        await self.permits.acquire()
        await decode_ok(call)

    @asynccontextmanager
    async def running(
        self, *others: Any, headers: Any = None, **config: Any
    ) -> AsyncIterator[Cluster]:
        """What waits at the end is let go and must be answered."""
        async with cluster(self.p, self.d, *others, **config) as self.c:
            self.ask(headers=headers)
            await until(lambda: len(self.d.calls) == 1)
            self.d.load = FULL
            await until(lambda: not self.c.node(self.d).state.load.free_blocks)
            yield self.c
            for _ in self.tasks:
                self.permits.release()  # one ends, and with nothing under way the next begins
            assert [(await each)[0] for each in self.tasks] == [200] * len(self.tasks)

    def ask(self, body: dict[str, Any] | None = None, **kwargs: Any) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(asked(self.c, body, **kwargs)))
        return self.tasks[-1]

    async def queue(self, body: dict[str, Any] | None = None, **kwargs: Any) -> asyncio.Task[Any]:
        """Ask, and see it wait."""
        before = self.waiting
        task = self.ask(body, **kwargs)
        await until(lambda: self.waiting == before + 1)
        return task

    @property
    def waiting(self) -> int:
        return sum(self.c.router.admission.waiting().values())


async def test_a_request_waits_while_there_is_no_room_and_begins_when_there_is() -> None:
    busy = Busy()
    async with busy.running() as c:
        await busy.queue()
        assert len(busy.p.calls) == 1
        assert c.metric("kvrelay_router_queue_waiting") == 1
        busy.d.load = ROOM
    assert c.metric("kvrelay_router_queue_wait_seconds_count") == 1
    assert not busy.waiting


async def test_who_waits_for_nodes_of_one_model_is_not_let_go_by_those_of_another() -> None:
    busy = Busy()
    async with busy.running(prefill(model="other"), decode(model="other", load=ROOM)) as c:
        await busy.queue()
        # A turn that is given back looks at its own queue only.
        assert (await asked(c, {"model": "other"}))[0] == 200
        await asyncio.sleep(5 * _LOOK_S)
        assert (busy.waiting, len(busy.p.calls)) == (1, 1)


async def test_a_client_that_leaves_while_it_waits_frees_its_place() -> None:
    busy = Busy()
    async with busy.running(max_queue=1, keys=keys(max_running=2), headers=ALICE) as c:
        leaves = await busy.queue(headers=ALICE)
        status, body, _ = await asked(c, headers=ALICE)
        assert (status, "its limit is 2" in body["error"]["message"]) == (429, True)
        leaves.cancel()
        busy.tasks.remove(leaves)
        await until(lambda: not busy.waiting)
        await busy.queue(headers=ALICE)
    assert len(busy.p.calls) == 2
    assert c.metric("kvrelay_router_refused_total", reason="client_gone") == 1


async def test_a_prompt_is_no_backlog_once_its_first_token_is_there() -> None:
    async def held(call: Call) -> None:
        await said.wait()
        await call.tokens(11, "a", 1)
        await go.wait()
        await decode_ok(call)

    said, go, d = asyncio.Event(), asyncio.Event(), decode(held)
    async with cluster(d) as c:
        asking = asyncio.create_task(asked(c))
        await until(lambda: bool(d.calls))
        assert c.node(d).state.backlog_ms
        said.set()
        await until(lambda: not c.node(d).state.backlog_ms)
        assert c.node(d).leases
        go.set()
        await asking


async def test_a_full_queue_costs_a_key_nothing() -> None:
    busy = Busy()
    async with busy.running(max_queue=1, keys=keys(requests_per_minute=9), headers=BOB) as c:
        await busy.queue(headers=BOB)
        for _ in range(2):
            status, body, headers = await asked(c, headers=ALICE)
            assert (status, body["error"]["code"]) == (429, "queue_full")
            assert headers["x-ratelimit-remaining-requests"] == "8"
        prompts_ms, tokens = c.router.placer.refused_work(time.monotonic())[MODEL]
        assert prompts_ms > 0 < tokens, "nodes have too little room for them"


async def test_an_expected_answer_refuses_nothing_and_its_key_pays_for_the_real_one() -> None:
    async with cluster(prefill(), decode(), keys=keys(tokens_per_minute=100)) as c:
        assert (await asked(c, headers=ALICE))[0] == 200  # 128 tokens were expected
        (queue,) = c.router.admission._queues.values()
        used = [
            c.metric("kvrelay_router_key_tokens_total", key="alice", kind=kind)
            for kind in ("prompt", "output")
        ]
        assert queue._clocks["alice"] == sum(used) < 100


def test_a_key_has_its_own_targets_or_the_routers_which_a_laxer_header_does_not_break() -> None:
    nothing: Any = SimpleNamespace()
    config = RouterConfig(ttft_target_ms=200.0, ttft_target_ms_per_token=0.1, tpot_target_ms=20.0)
    slo = AdmissionController(config, Pool([], []), nothing, nothing).slo
    strict = Caller("strict", hash_of("a"), ttft_target_ms_per_token=0.05, tpot_target_ms=15.0)
    lax = Caller("lax", hash_of("b"), ttft_target_ms=900.0, tpot_target_ms=30.0)
    for caller, tpots, ttft_s in (
        (ANYONE, [0.02, 0.02, 0.01], 0.5),
        (strict, [0.015, 0.015, 0.01], 0.35),
        (lax, [0.03, 0.03, 0.01], 1.2),
    ):
        assert [slo(caller, None, told, 1).tpot_s for told in (None, 0.05, 0.01)] == tpots
        assert [slo(caller, told, None, 3_000).ttft_s for told in (None, 0.1)] == [ttft_s, 0.1]


async def test_a_target_of_a_key_is_a_limit_of_its_requests_alone() -> None:
    async with cluster(prefill(), decode(), keys=keys(ttft_target_ms=0.001)) as c:
        for node in c.router.pool.nodes:
            node.state.set_costs(COSTS, 50.0)
        assert (await asked(c, headers=ALICE))[1]["error"]["code"] == "ttft_never"
        assert (await asked(c, headers=BOB))[0] == 200


async def test_who_waits_until_the_deadline_is_told_so() -> None:
    busy = Busy()
    async with busy.running(request_deadline_s=1.0) as c:
        status, body, _ = await asked(c)
        assert (status, body["error"]["type"]) == (504, "deadline_exceeded")
        assert (await busy.tasks.pop())[0] == 504
        assert not busy.waiting


async def test_targets_that_cannot_be_kept_are_refused_before_anything_is_computed() -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as c:
        for node in (p, d):
            c.node(node).state.set_costs(COSTS, 50.0)
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms"):
            status, body, headers = await asked(
                c, {"messages": [{"role": "user", "content": "x" * 4000}]}, headers={name: "0.001"}
            )
            assert (status, body["error"]["type"]) == (429, "overloaded_error")
            assert body["error"]["code"] in ("ttft_never", "tpot_never")
            assert headers["x-should-retry"] == "false"
            assert "retry-after" not in headers
        error = (await asked(c, headers={"x-slo-ttft-ms": "soon"}))[1]["error"]
        assert error["param"] == "x-slo-ttft-ms"
        kept = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "1000"}
        assert (await asked(c, headers=kept))[0] == 200
        assert len(p.calls) == 1


async def test_a_backlog_that_breaks_the_target_is_refused_with_the_time_it_takes() -> None:
    p, d = prefill(load=Load(waiting=50, waiting_tokens=10**6)), decode()
    async with cluster(p, d, ttft_target_ms=1000.0) as c:
        c.node(p).state.set_costs(COSTS, 50.0)
        await until(lambda: c.node(p).state.backlog_ms == 40_000)
        status, body, headers = await asked(c)
        assert (status, body["error"]["code"]) == (429, "ttft")
        assert int(headers["retry-after"]) == pytest.approx(40 / 0.95 - 1, abs=1)
        p.load = Load(waiting=50, waiting_tokens=10**8)
        await until(lambda: c.node(p).state.backlog_ms == 4_000_000)
        assert (await asked(c))[2]["retry-after"] == "60"  # clients obey no longer time
        p.load = Load()
        await until(lambda: c.node(p).state.is_idle)
        assert (await asked(c))[0] == 200
        # 9.4 s are too long for one that has waited, though its target is longer.
        p.load, d.load = Load(waiting=1, waiting_tokens=235_000), replace(FULL, running=1)
        await until(lambda: c.node(p).state.backlog_ms == 9_400 and not c.node(d).state.room)
        waiting = asyncio.create_task(asked(c, headers={"x-slo-ttft-ms": "10000"}))
        await until(lambda: bool(c.router.admission.waiting()))
        await asyncio.sleep(0.2)
        d.load = ROOM
        assert (await waiting)[1]["error"]["code"] == "ttft"


async def test_questions_count_against_the_limits_of_their_key() -> None:
    async with cluster(
        prefill(), decode(), keys=keys(requests_per_minute=3, tokens_per_minute=1000)
    ) as c:

        async def ask(path: str, **body: Any) -> tuple[int, str | None]:
            async with c.post(body, path, headers=ALICE) as answer:
                return answer.status, answer.headers.get("x-ratelimit-remaining-tokens")

        assert (await ask("/tokenize", prompt="x" * 9999))[0] == 200
        assert (await ask("/v1/messages/count_tokens"))[0] == 200
        assert (await ask("/detokenize", tokens=[-1]))[0] == 400
        assert await ask("/tokenize", prompt="hi") == (429, "1000")
        assert (await ask("/v1/chat/completions"))[0] == 429
        assert (await c.asked({"prompt": "hi"}, "/tokenize", headers=BOB)).status == 200


async def test_limits_of_a_key_are_told_in_headers_and_are_its_own() -> None:
    async with cluster(
        prefill(), decode(), keys=keys(requests_per_minute=2, tokens_per_minute=10_000)
    ) as c:
        for left in ("1", "0"):
            status, _, headers = await asked(c, headers=ALICE)
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, left)
            assert headers["x-ratelimit-limit-tokens"] == "10000"
        status, body, headers = await asked(c, headers=ALICE)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert 25 <= int(headers["retry-after"]) <= 31
        status, _, headers = await asked(c, headers=BOB)
        assert (status, "x-ratelimit-limit-requests" in headers) == (200, False)
        await until(
            lambda: c.metric("kvrelay_router_key_requests_total", key="alice", outcome="begun") == 2
        )
        assert c.metric("kvrelay_router_key_requests_total", key="alice", outcome="refused") == 1
        await until(
            lambda: c.metric("kvrelay_router_key_tokens_total", key="alice", kind="output") == 6
        )
        assert c.metric("kvrelay_router_key_tokens_total", key="alice", kind="prompt") == 6


async def test_a_key_may_ask_for_its_models_and_priorities_only() -> None:
    p = prefill(adapters=["sql"])
    async with cluster(p, decode(adapters=["sql"]), keys=keys(models=("sql",), priority=2)) as c:
        assert (await asked(c, headers=ALICE))[0] == 404
        assert (await asked(c, {"model": "sql", "priority": 1}, headers=ALICE))[0] == 403
        assert (await asked(c, {"model": "sql"}, headers=ALICE))[0] == 200
        assert p.calls[-1].body["priority"] == 2
        assert [
            card["id"] for card in (await c.ask("GET", "/v1/models", headers=ALICE)).json["data"]
        ] == ["sql"]
        assert (await c.ask("GET", "/v1/models/tiny", headers=ALICE)).status == 404
        assert (
            await c.ask("POST", "/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=ALICE)
        ).status == 403
        assert p.told == []


async def test_a_walk_that_fails_gives_its_turn_back() -> None:
    async with cluster(prefill(cut), decode(), keys=keys(max_running=1), attempts=1) as c:
        for _ in range(3):
            await c.all_up()
            assert (await asked(c, headers=ALICE))[0] in (502, 503)


async def test_several_prompts_are_one_turn() -> None:
    async with cluster(prefill(), decode(), keys=keys(max_running=1)) as c:
        body = {"prompt": ["a", "b"], "stream": True}
        for _ in range(2):
            assert "[DONE]" in await c.text(body, path="/v1/completions", headers=ALICE)
            await until(lambda: not c.router.log.running)


@pytest.mark.parametrize("how", ["one token", "local", "ahead"])
async def test_a_prompt_that_was_not_handed_over_is_charged_as_its_node_has_counted_it(
    how: str,
) -> None:
    async def ends(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await call.send(Frame(FrameKind.END, WHOLE, usage=(7, 1, 0)))

    async def waits(call: Call) -> None:
        await call.send(Frame(FrameKind.TICKET, params=handover(call, generated=[], growing=True)))
        await asyncio.sleep(30)

    nodes = (
        [decode(ends)]
        if how == "local"
        else [prefill(ends if how == "one token" else waits), decode(ends)]
    )
    async with cluster(*nodes, keys=keys()) as c:
        assert (await asked(c, headers=ALICE))[0] == 200
        await until(
            lambda: c.metric("kvrelay_router_key_tokens_total", key="alice", kind="output") == 1
        )
        assert c.metric("kvrelay_router_key_tokens_total", key="alice", kind="prompt") == 7
