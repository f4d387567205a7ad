"""`kvrelay drain` and `kvrelay role`: what they wait for, and what they say when they cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from kvrelay import cli
from kvrelay.router.guard import check_operator
from kvrelay.wire.errors import Unauthorized


async def asked(
    command: str, answers: dict[str, list[Any]], *flags: str
) -> tuple[int, dict[str, list[str]]]:
    """Run a command against a node with these answers, in turn, by path: its exit code, and the
    keys it sent.
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
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        typed = f"127.0.0.1:{runner.addresses[0][1]}/v1"
        role = ["decode"] if command == "role" else []
        return await asyncio.to_thread(cli.run, [command, typed, *role, *flags]), keys
    finally:
        await runner.cleanup()


def left(requests: int, blocks: int) -> tuple[int, dict[str, Any]]:
    return 503, {"status": "draining", "requests": requests, "held_blocks": blocks}


def health(role: str, to: str | None = None) -> tuple[int, dict[str, Any]]:
    return 200, {"status": "flipping" if to else "ok", "role": role, "flips_to": to}


def refused(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "a type"}}


async def test_drain_returns_when_the_node_has_ended_what_it_had(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = {"/drain": [(200, {})], "/health": [left(2, 4), left(0, 4), left(0, 0)]}
    code, keys = await asked("drain", answers, "--node-api-key", "k")
    assert (code, keys["/drain"]) == (0, ["Bearer k"])
    told = capsys.readouterr().out
    assert "2 requests and 4 held blocks" in told
    assert "is drained" in told


async def test_undo_has_it_take_requests_again(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"/undrain": [(200, {})], "/health": [health("decode")]}
    code, keys = await asked("drain", answers, "--undo", "--node-api-key", "k")
    assert (code, keys["/undrain"]) == (0, ["Bearer k"])
    assert "takes requests again" in capsys.readouterr().out


async def test_role_returns_when_the_node_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    flipping = [health("prefill", "decode")] * 2 + [health("decode")]
    answers = {"/admin/role": [(202, {})], "/health": flipping}
    code, keys = await asked("role", answers, "--node-api-key", "k")
    assert (code, keys["/admin/role"]) == (0, ["Bearer k"])
    told = capsys.readouterr().out
    assert told.count(" still has ") == 1
    assert "is a decode node" in told


@pytest.mark.parametrize(
    ("command", "answers", "said"),
    [
        ("drain", {"/drain": [(200, {})], "/health": [left(1, 0)]}, "still has 1 requests"),
        (
            "drain",
            {"/drain": [refused(401, "the API key is missing")]},
            "the API key is missing; give it with --node-api-key (KVRELAY_NODE_API_KEY)",
        ),
        (
            "drain",
            {"/drain": [(200, {})], "/health": [left(1, 0), refused(503, "the engine has ended")]},
            "the engine has ended",
        ),
        (
            "role",
            {
                "/admin/role": [(202, {})],
                "/health": [health("prefill", "decode"), health("prefill")],
            },
            "called it off",
        ),
        (
            "role",
            {"/admin/role": [(202, {})], "/health": [health("prefill", "decode")]},
            "after 0.1 s",
        ),
        ("role", {"/admin/role": [(202, {})], "/health": [(503, "starting")]}, "is no report"),
        ("role", {"/admin/role": [refused(409, "it drains")]}, "it drains"),
    ],
)
async def test_a_node_that_refuses_or_is_too_late_ends_it_with_1(
    command: str, answers: dict[str, list[Any]], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    late = said in ("still has 1 requests", "after 0.1 s")
    code, _ = await asked(command, answers, "--wait", "0.1" if late else "60")
    assert code == 1
    assert said in capsys.readouterr().err.replace("\n", " ")


async def test_a_router_has_no_role(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unauthorized) as why:
        check_operator("", "k")
    code, _ = await asked("role", {"/admin/role": [refused(401, str(why.value))]})
    said = capsys.readouterr().err.replace("\n", " ")
    assert (code, "roles are of nodes; give the address of a node" in said) == (1, True)


def test_what_is_typed_wrong_is_refused() -> None:
    assert cli.run(["role", "somewhere", "decode"]) == 2
    assert cli.run(["role", "http://127.0.0.1:9", "aggregated"]) == 2
    assert cli.run(["drain", "http://127.0.0.1:1"]) == 1
