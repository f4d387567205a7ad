"""`kvrelay top`: one picture into a pipe, and what it says when there is none."""

from __future__ import annotations

import asyncio
import io
import socket
from contextlib import ExitStack

import msgspec
import pytest
from rich.console import Console

from kvrelay import cli
from kvrelay.drawn_keys import drawn_key
from kvrelay.router.roles import RoleChange
from kvrelay.router.state import FailedPair, RoleStatus
from kvrelay.top import drawn
from tests.router.router_doubles import cluster, decode, prefill


async def test_it_prints_nodes_and_requests_once_into_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    p, d = prefill(), decode()
    async with cluster(p, d, admin_key="operator") as c:
        await c.text(headers={"x-request-id": "mine"})
        await asyncio.to_thread(c.router.pool.drain, c.node(d), 0.0)
        flags = ["top", "--router", c.url, "--admin-key", "operator"]
        assert await asyncio.to_thread(cli.run, flags) == 0
        told = capsys.readouterr().out
        for name in (p.url, d.url):
            assert name.removeprefix("http://") in told
        assert "unavailable" in told
        assert "draining" in told
        assert "mine" in told

        assert await asyncio.to_thread(cli.run, flags[:3]) == 1
        assert "admin key" in capsys.readouterr().err


async def test_the_commands_find_the_key_that_a_router_of_this_machine_has_drawn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as drawing, socket.create_server(("127.0.0.1", 0)) as held:
        key = drawing.enter_context(drawn_key("admin", held.getsockname()[1]))
        p, d, other = prefill(), decode(), decode()
        async with cluster(p, d, other, admin_key=key, listening=held) as c:
            plain, typed = other.url.removeprefix("http://"), c.url.removeprefix("http://") + "/v1"
            for words in (
                ["top", "--router", c.url],
                ["top", "--router", typed],
                ["drain", plain, "--router", typed],
                ["drain", other.url, "--router", c.url, "--undo"],
                ["role", d.url, "decode", "--router", c.url],
            ):
                assert await asyncio.to_thread(cli.run, words) == 0, capsys.readouterr().err
            given = [*words, "--admin-key", "another"]
            assert await asyncio.to_thread(cli.run, given) == 1
            assert "missing or wrong" in capsys.readouterr().err
            drawing.close()  # the file is gone
            assert await asyncio.to_thread(cli.run, words) == 1


def test_who_is_not_there_and_what_is_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["top", "--router", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert cli.run(["top", "--router", "somewhere"]) == 2
    assert cli.run(["top", "--interval", "0"]) == 2


async def test_it_says_that_a_picture_is_old_and_that_a_process_is_silent() -> None:
    async with cluster() as c:
        seen = c.router.console.snapshot(0.0)
    console = Console(width=120, file=io.StringIO())
    with console.capture() as told:
        console.print(
            drawn(
                msgspec.structs.replace(seen, wanted=2),
                "cannot be reached; what is shown is 7 s old",
            )
        )
    assert "7 s old" in told.get()
    assert "1 of 2 router processes" in told.get()


async def test_a_narrow_terminal_gets_whole_columns_and_fewer_of_them() -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as c:
        await c.text()
        seen = c.router.console.snapshot(0.0)
    pair = FailedPair(p.url, d.url, "no way")
    nodes = [
        msgspec.structs.replace(node, total_blocks=9, up=False, reason="no answer")
        for node in seen.nodes
    ]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as told:
        console.print(drawn(msgspec.structs.replace(seen, nodes=nodes, failed_pairs=[pair])))
    text = told.get()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for name in (
        p.url,
        d.url,
        "no answer",
        "KV in use",
        "status",
        "first token",
        "total",
        "no way",
    ):
        assert name.removeprefix("http://") in text
    assert "breakers" not in text


async def test_an_ipv6_address_is_shown_whole() -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as c:
        seen = c.router.console.snapshot(0.0)
    nodes = [msgspec.structs.replace(node, url="http://[fd00::1]:8100") for node in seen.nodes]
    console = Console(width=120, file=io.StringIO())
    with console.capture() as told:
        console.print(drawn(msgspec.structs.replace(seen, nodes=nodes)))
    assert "[fd00::1]:8100" in told.get()


async def test_it_shows_the_roles() -> None:
    async with cluster() as c:
        seen = c.router.console.snapshot(0.0)
    changes = [
        RoleChange(seen.now - 9, "prefill", "http://d", "it was short", f"begun {at}")
        for at in range(5)
    ]
    roles = [RoleStatus("tiny", "no role is short of nodes", {}, changes)]
    console = Console(width=120, file=io.StringIO())
    with console.capture() as told:
        console.print(drawn(msgspec.structs.replace(seen, roles=roles)))
    assert "roles of tiny: no role is short of nodes" in told.get()
    assert "9 s ago, d to prefill: begun 2" in told.get()
    assert "begun 3" not in told.get()
