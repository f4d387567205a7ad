"""`kvrelay drain` and `kvrelay role`: what they wait for, and what they say when they cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from kvrelay import cli
from kvrelay.drawn_keys import drawn_key


@asynccontextmanager
async def served(answers: dict[str, list[Any]]) -> AsyncIterator[tuple[str, dict[str, list[str]]]]:
    """A server with these answers, in turn, by path: where it is, and the keys that it was asked
    with.
    """
    keys: dict[str, list[str]] = {}

    async def answer(request: web.Request) -> web.Response:
        keys.setdefault(request.path, []).append(request.headers.get("authorization", ""))
        left = answers[request.path]
        status, body = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", keys
    finally:
        await runner.cleanup()


async def asked(
    command: str, answers: dict[str, list[Any]], *flags: str, node: str = ""
) -> tuple[int, dict[str, list[str]]]:
    """Run a command against a server with these answers: its exit code, and the keys it sent."""
    async with served(answers) as (url, keys):
        arguments = [command, node or url, *(flag.replace("URL", url) for flag in flags)]
        return await asyncio.to_thread(cli.run, arguments), keys


drained = partial(asked, "drain")


async def role(
    answers: dict[str, list[Any]], *flags: str, node: str = ""
) -> tuple[int, dict[str, list[str]]]:
    return await asked("role", answers, "decode", *flags, node=node)


def left(requests: int, blocks: int) -> tuple[int, dict[str, Any]]:
    return 503, {"status": "draining", "requests": requests, "held_blocks": blocks}


async def test_it_returns_when_the_node_has_ended_what_it_had(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = {"/drain": [(200, {})], "/health": [left(2, 4), left(0, 4), left(0, 0)]}
    code, keys = await drained(answers, "--node-api-key", "k")
    assert (code, keys["/drain"]) == (0, ["Bearer k"])
    told = capsys.readouterr().out.replace("\n", " ")
    assert "2 requests and 4 held blocks" in told
    assert "is drained" in told


async def test_of_a_node_that_is_not_ours_the_router_tells_what_is_left() -> None:
    node = "http://127.0.0.1:9"
    rows = [(200, {"nodes": [{"url": node, "legs": legs, "held_blocks": 0}]}) for legs in (1, 0)]
    answers = {"/admin/drain": [(200, {"node_told": False})], "/admin/nodes": rows}
    code, keys = await drained(answers, "--router", "URL", "--admin-key", "a", node=node)
    assert (code, keys["/admin/nodes"]) == (0, ["Bearer a", "Bearer a"])


async def test_a_node_that_is_not_idle_in_time_and_one_that_refuses_end_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (await drained({"/drain": [(200, {})], "/health": [left(1, 0)]}, "--wait", "0.1"))[
        0
    ] == 1
    assert "still has 1 requests" in capsys.readouterr().err
    refusal = {
        "error": {"message": "the API key is missing or wrong", "type": "authentication_error"}
    }
    assert (await drained({"/drain": [(401, refusal)]}))[0] == 1
    told = capsys.readouterr().err.replace("\n", " ")
    assert "API key" in told
    dead = 503, {"error": {"message": "the engine has ended", "type": "service_unavailable"}}
    assert (await drained({"/drain": [(200, {})], "/health": [left(1, 0), dead]}))[0] == 1
    assert "the engine has ended" in capsys.readouterr().err
    assert "--node-api-key (KVRELAY_NODE_API_KEY)" in told


async def test_undo_has_it_take_requests_again_by_either_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, keys = await drained({"/undrain": [(200, {})]}, "--undo", "--node-api-key", "k")
    assert (code, keys) == (0, {"/undrain": ["Bearer k"]})
    by_router = {"/admin/undrain": [(200, {"node_told": True})]}
    code, keys = await drained(
        by_router, "--undo", "--router", "URL", "--admin-key", "a", node="http://127.0.0.1:9"
    )
    assert (code, keys) == (0, {"/admin/undrain": ["Bearer a"]})
    assert capsys.readouterr().out.replace("\n", " ").count("takes requests again") == 2


def health(role: str, to: str | None = None) -> tuple[int, dict[str, Any]]:
    return 200, {"status": "flipping" if to else "ok", "role": role, "flips_to": to}


async def test_it_returns_when_the_node_has_the_role(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {
        "/admin/role": [(202, {})],
        "/health": [health("prefill", "decode")] * 2 + [health("decode")],
    }
    code, keys = await role(answers, "--node-api-key", "k")
    assert (code, keys["/admin/role"]) == (0, ["Bearer k"])
    told = capsys.readouterr().out.replace("\n", " ")
    assert told.count("ends what it has") == 1
    assert "is a decode node" in told


async def test_asked_by_a_router_it_waits_until_that_router_uses_it() -> None:
    node = "http://127.0.0.1:9"
    rows = [
        (200, {"nodes": [{"url": node, "role": role, "flips_to": to, "up": up}]})
        for role, to, up in (
            ("prefill", "decode", False),
            ("decode", None, False),
            ("decode", None, True),
        )
    ]
    answers = {"/admin/nodes/role": [(200, {})], "/admin/nodes": rows}
    code, keys = await role(answers, "--router", "URL", "--admin-key", "a", node=node)
    assert (code, keys["/admin/nodes"]) == (0, ["Bearer a"] * 3)


async def test_a_node_that_keeps_its_role_ends_it_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: dict[str, list[Any]] = {"/admin/role": [(202, {})]}
    assert (await role(asked | {"/health": [health("prefill", "decode"), health("prefill")]}))[
        0
    ] == 1
    assert "called it off" in capsys.readouterr().err
    assert (await role(asked | {"/health": [health("prefill", "decode")]}, "--wait", "0.1"))[0] == 1
    assert "no decode node after 0.1 s" in capsys.readouterr().err
    dead = {
        "error": {
            "message": "the engine process of this node has ended",
            "type": "service_unavailable",
        }
    }
    assert (await role(asked | {"/health": [health("prefill", "decode"), (503, dead)]}))[0] == 1
    assert "the engine process of this node has ended" in capsys.readouterr().err.replace("\n", " ")
    assert (await role(asked | {"/health": [(503, "starting")]}))[0] == 1
    assert "what is no report" in capsys.readouterr().err.replace("\n", " ")
    refusal = {
        "error": {
            "message": "it is the last one; send force: true",
            "type": "invalid_request_error",
        }
    }
    assert (await role({"/admin/role": [(409, refusal)]}))[0] == 1
    assert "send force: true" in capsys.readouterr().err.replace("\n", " ")
    assert cli.run(["role", "somewhere", "decode"]) == 2
    assert cli.run(["role", "http://127.0.0.1:9", "aggregated"]) == 2


async def test_the_key_that_a_router_of_this_machine_has_drawn_is_found() -> None:
    async with served({"/admin/undrain": [(200, {})]}) as (url, keys):
        typed = url.removeprefix("http://") + "/v1"
        words = ["drain", "127.0.0.1:1", "--router", typed, "--undo"]
        with drawn_key("admin", int(url.rpartition(":")[2])) as key:
            assert await asyncio.to_thread(cli.run, words) == 0
        assert await asyncio.to_thread(cli.run, words) == 0  # the file is gone
    assert keys["/admin/undrain"] == [f"Bearer {key}", ""]
