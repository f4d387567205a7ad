"""Admission in a router over fake nodes: who waits, who is refused, and what is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from router_doubles import (
    WHOLE,
    Call,
    Cluster,
    cluster,
    decode,
    decode_ok,
    handover,
    prefill,
    until,
)

from kvrelay.router.admission.controller import _LOOK_S
from kvrelay.router.admission.keys import hash_of
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import KeyConfig
from kvrelay.wire.step_costs import StepCosts

ROOM = Load(free_blocks=100, total_blocks=100, block_size=16, legs=1)
FULL = Load(free_blocks=0, total_blocks=100, block_size=16, legs=1)
COSTS = StepCosts(8.0, 0.1, 0.0, 0.0, 0.04, 0.0)
ALICE, BOB = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}


def keys(**alice: Any) -> tuple[KeyConfig, ...]:
    return (KeyConfig("alice", hash_of("a"), **alice), KeyConfig("bob", hash_of("b")))


async def full(c: Cluster, *nodes: Any, load: Load = FULL) -> None:
    """The decode nodes report that they have no room (or this load)."""
    for node in nodes:
        node.load = load
    await until(lambda: all(c.node(node).load.free_blocks == load.free_blocks for node in nodes))


class Held:
    """A decode script that ends its answers one by one, as it is let."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)

    async def __call__(self, call: Call) -> None:
        await self.permits.acquire()
        await decode_ok(call)


async def asked(
    c: Cluster, body: dict[str, Any] | None = None, **kwargs: Any
) -> tuple[int, Any, Any]:
    async with c.post(body, **kwargs) as answer:
        return answer.status, await answer.json(), answer.headers


def waiting(c: Cluster, count: int) -> Awaitable[None]:
    return until(lambda: c.metric("kvrelay_router_queue_waiting") == count)


def soon(work: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def one_under_way(c: Cluster, d: Any) -> asyncio.Task[Any]:
    """A request whose decode leg waits, and no room for another one."""
    first = soon(asked(c))
    await until(lambda: len(d.calls) == 1)
    await full(c, d)
    return first


async def test_a_request_waits_while_there_is_no_room_and_begins_when_there_is() -> None:
    held = Held()
    p, d = prefill(), decode(held, load=ROOM)
    async with cluster(p, d) as c:
        first = await one_under_way(c, d)
        second = soon(asked(c))
        await waiting(c, 1)
        assert len(p.calls) == 1
        d.load = ROOM
        held.permits.release()
        held.permits.release()
        assert [(await each)[0] for each in (first, second)] == [200, 200]
        assert c.metric("kvrelay_router_admitted_total", how="queued") == 1
        assert c.metric("kvrelay_router_queue_wait_seconds_count") == 1
        assert not c.router.admission.waiting()


async def test_who_waits_for_nodes_of_one_model_is_not_let_go_by_those_of_another() -> None:
    held = Held()
    p, d = prefill(), decode(held, load=ROOM)
    async with cluster(p, d, prefill(model="other"), decode(model="other", load=ROOM)) as c:
        first = await one_under_way(c, d)
        second = soon(asked(c))
        await waiting(c, 1)
        other = soon(
            asked(c, {"model": "other"})
        )  # a turn that is given back looks at its own queue only
        assert (await other)[0] == 200
        await asyncio.sleep(5 * _LOOK_S)
        assert (sum(c.router.admission.waiting().values()), len(p.calls)) == (1, 1)
        held.permits.release()
        held.permits.release()
        assert [(await each)[0] for each in (first, second)] == [200, 200]


async def test_a_full_queue_is_a_429_that_says_when_to_return() -> None:
    held = Held()
    d = decode(held, load=ROOM)
    async with cluster(prefill(), d, max_queue=1) as c:
        first = await one_under_way(c, d)
        second = soon(asked(c))
        await waiting(c, 1)
        status, body, headers = await asked(c)
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            429,
            "overloaded_error",
            "queue_full",
        )
        assert int(headers["retry-after"]) >= 1
        assert "1 requests wait, and the limit is 1" in body["error"]["message"]
        assert c.metric("kvrelay_router_refused_total", reason="queue_full") == 1
        held.permits.release()
        held.permits.release()
        assert [(await each)[0] for each in (first, second)] == [200, 200]


async def test_those_that_wait_begin_by_priority_and_then_in_turns_of_their_keys() -> None:
    held = Held()
    p, d = prefill(), decode(held, load=ROOM)
    async with cluster(p, d, keys=keys(priority=-1)) as c:
        tasks = [soon(asked(c, headers=ALICE))]
        await until(lambda: len(d.calls) == 1)
        await full(c, d)
        for user, headers, priority in (
            ("a1", ALICE, 0), ("a2", ALICE, 0), ("a3", ALICE, 0), ("b1", BOB, 0), ("b2", BOB, 5), ("a4", ALICE, -1)
        ):  # fmt: skip
            before = sum(c.router.admission.waiting().values())
            tasks.append(
                soon(
                    asked(c, {"user": user, "priority": priority, "max_tokens": 4}, headers=headers)
                )
            )
            await waiting(c, before + 1)
        for _ in tasks:
            held.permits.release()  # one ends, and with nothing under way the next begins
        assert [(await each)[0] for each in tasks] == [200] * len(tasks)
        assert [call.body.get("user") for call in p.calls] == [
            None,
            "a4",
            "b1",
            "a1",
            "a2",
            "a3",
            "b2",
        ]
        assert p.calls[0].body["priority"] == -1  # of its key, for the nodes' own queues
        assert "priority" not in p.calls[1].body or p.calls[1].body["priority"] == -1


async def test_a_client_that_leaves_while_it_waits_frees_its_place() -> None:
    held = Held()
    p, d = prefill(), decode(held, load=ROOM)
    async with cluster(p, d, max_queue=1, keys=keys(max_running=2)) as c:
        first = soon(asked(c, headers=ALICE))
        await until(lambda: len(d.calls) == 1)
        await full(c, d)
        second = soon(asked(c, headers=ALICE))
        await waiting(c, 1)
        status, body, _ = await asked(c, headers=ALICE)
        assert (status, "its limit is 2" in body["error"]["message"]) == (429, True)
        second.cancel()
        await waiting(c, 0)
        third = soon(asked(c, headers=ALICE))
        await waiting(c, 1)
        held.permits.release()
        held.permits.release()
        assert [(await each)[0] for each in (first, third)] == [200, 200]
        assert len(p.calls) == 2
        assert c.metric("kvrelay_router_refused_total", reason="client_gone") == 1


async def test_a_more_important_request_takes_the_place_of_a_less_important_one() -> None:
    held = Held()
    d = decode(held, load=ROOM)
    async with cluster(prefill(), d, max_queue=1) as c:
        first = await one_under_way(c, d)
        less = soon(asked(c, {"priority": 5}))
        await waiting(c, 1)
        more = soon(asked(c, {"priority": -5}))
        status, body, headers = await less
        assert (status, body["error"]["code"]) == (429, "displaced")
        assert "retry-after" in headers
        held.permits.release()
        held.permits.release()
        assert [(await each)[0] for each in (first, more)] == [200, 200]


async def test_who_waits_until_the_deadline_is_told_so() -> None:
    held = Held()
    d = decode(held, load=ROOM)
    async with cluster(prefill(), d, request_deadline_s=1.0) as c:
        first = await one_under_way(c, d)
        status, body, _ = await asked(c)
        assert (status, body["error"]["type"]) == (504, "deadline_exceeded")
        assert (await first)[0] == 504
        assert not c.router.admission.waiting()


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
        assert (await asked(c, headers={"x-slo-ttft-ms": "soon"}))[1]["error"][
            "param"
        ] == "x-slo-ttft-ms"
        assert (await asked(c, headers={"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "1000"}))[
            0
        ] == 200
        assert len(p.calls) == 1


async def test_a_backlog_that_breaks_the_target_is_refused_with_the_time_it_takes() -> None:
    p = prefill(load=Load(waiting=50, waiting_tokens=10**6))
    async with cluster(p, decode(), ttft_target_ms=1000.0) as c:
        c.node(p).state.set_costs(COSTS, 50.0)
        await until(lambda: c.node(p).state.backlog_ms == 40_000)
        status, body, headers = await asked(c)
        assert (status, body["error"]["code"]) == (429, "ttft")
        assert int(headers["retry-after"]) == pytest.approx(39, abs=1)
        p.load = Load()
        await until(lambda: c.node(p).state.is_idle)
        assert (await asked(c))[0] == 200


async def test_nobody_is_sent_away_for_longer_than_clients_obey() -> None:
    p = prefill(load=Load(waiting=50, waiting_tokens=10**8))
    async with cluster(p, decode(), ttft_target_ms=1000.0) as c:
        c.node(p).state.set_costs(COSTS, 50.0)
        await until(lambda: c.node(p).state.backlog_ms == 4_000_000)
        assert (await asked(c))[2]["retry-after"] == "60"


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
        async with c.post({"prompt": "hi"}, "/tokenize", headers=BOB) as answer:
            assert answer.status == 200


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
        async with c.http.get(f"{c.url}/v1/models", headers=ALICE) as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["sql"]
        async with c.http.get(f"{c.url}/v1/models/tiny", headers=ALICE) as answer:
            assert answer.status == 404
        async with c.http.post(
            f"{c.url}/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=ALICE
        ) as answer:
            assert answer.status == 403
        assert p.told == []


async def test_a_walk_that_fails_gives_its_turn_back() -> None:
    async def cut(call: Call) -> None:
        call.cut()

    async with cluster(prefill(cut), decode(), keys=keys(max_running=1), attempts=1) as c:
        for _ in range(3):
            await until(lambda: all(node.up for node in c.router.pool.nodes))
            assert (await asked(c, headers=ALICE))[0] in (502, 503)


async def test_several_prompts_are_one_turn() -> None:
    async with cluster(prefill(), decode(), keys=keys(max_running=1)) as c:
        body = {"prompt": ["a", "b"], "stream": True}
        for _ in range(2):
            assert "[DONE]" in await c.text(body, path="/v1/completions", headers=ALICE)
            await until(lambda: not c.router.live)


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
