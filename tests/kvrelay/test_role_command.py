"""`kvrelay role`: what it waits for, and what it says when the node keeps its role."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_drain_command import served

from kvrelay import cli


async def role(
    answers: dict[str, list[Any]], *flags: str, node: str = ""
) -> tuple[int, dict[str, list[str]]]:
    """Run the command against a server with these answers; its exit code, and the keys it came
    with.
    """
    async with served(answers) as (url, keys):
        arguments = ["role", node or url, "decode", *(flag.replace("URL", url) for flag in flags)]
        return await asyncio.to_thread(cli.run, arguments), keys


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
