"""A running router takes a new configuration over: all of it or nothing, and nothing that was begun
notices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_doubles import (
    MODEL,
    Call,
    Cluster,
    FakeNode,
    decode,
    decode_ok,
    prefill,
    router_over,
    until,
)

from kvrelay.router.admission.keys import hash_of
from kvrelay.router.router import changes
from kvrelay.router.server import serve
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import LIVE, KeyConfig, RouterConfig

FIELDS = {field.name for field in dataclasses.fields(RouterConfig)}


def test_every_setting_is_live_or_fixed_and_a_fixed_one_is_refused_by_name() -> None:
    assert LIVE < FIELDS
    old = RouterConfig()
    for name in sorted(FIELDS):
        new = RouterConfig()
        object.__setattr__(new, name, "another")  # whatever values it may have
        if name in LIVE:
            assert changes(old, new) == [name]
        else:
            with pytest.raises(ConfigError, match=f"^{name} cannot change while the router runs"):
                changes(old, new)
    assert changes(old, RouterConfig()) == []


def test_values_of_secrets_are_not_told() -> None:
    with pytest.raises(ConfigError) as told:
        changes(
            RouterConfig(node_api_key="secret-1"),
            RouterConfig(node_api_key="secret-2", api_key="secret-3"),
        )
    assert "secret" not in told.value.message


class File:
    """The configuration as it is read again."""

    def __init__(self, *nodes: FakeNode, **fields: Any) -> None:
        lists = {"prefill": tuple(n.url for n in nodes if n.role == "prefill")}
        lists["decode"] = tuple(n.url for n in nodes if n.role == "decode")
        fields = {"health_interval_s": 0.05, "strict_roles": True, "admin_key": "operator"} | fields
        self.config = RouterConfig(**lists, **fields)

    def write(self, **fields: Any) -> None:
        self.config = dataclasses.replace(self.config, **fields)

    def read(self) -> RouterConfig:
        return self.config


@asynccontextmanager
async def reloading(
    *nodes: FakeNode, later: Sequence[FakeNode] = (), **fields: Any
) -> AsyncIterator[tuple[Cluster, File]]:
    """A router over these nodes, and the file that it reads; nodes that come `later` run, too."""
    async with AsyncExitStack() as stack:
        for node in (*nodes, *later):
            await stack.enter_async_context(node.running())
        file = File(*nodes, **fields)
        c = await stack.enter_async_context(router_over(file.read(), file.read))
        await c.all_up()
        yield c, file


async def status(c: Cluster, key: str, **body: Any) -> int:
    return (await c.asked(body, headers={"authorization": f"Bearer {key}"})).status


async def test_keys_aliases_limits_policies_and_nodes_change_while_requests_run() -> None:
    go = asyncio.Event()

    async def held(call: Call) -> None:
        await call.tokens(12, "b", 2)
        await go.wait()
        await call.tokens(13, "c", 3)
        await call.end()

    p, d, later = prefill(), decode(held), decode(decode_ok)
    ann = KeyConfig("ann", hash_of("ann"))
    async with reloading(p, d, later=[later], keys=(ann,)) as (c, file):
        begun = asyncio.create_task(
            c.text({"stream": True}, headers={"authorization": "Bearer ann"})
        )
        await until(lambda: bool(d.calls))
        assert await c.operate("/admin/reload") == (200, {"changed": []})
        file.write(
            keys=(KeyConfig("bob", hash_of("bob"), requests_per_minute=2),),
            alias=(f"best={MODEL}",),
            decode=(later.url,),
            prefill_policy="round_robin",
            max_queue=3,
            max_body_bytes=2000,
        )
        assert await c.operate("/admin/reload") == (
            200,
            {
                "changed": [
                    "prefill",
                    "max_body_bytes",
                    "decode",
                    "alias",
                    "keys",
                    "max_queue",
                    "prefill_policy",
                ][1:]
            },
        )
        await until(lambda: any(node.url == later.url and node.up for node in c.router.pool.nodes))
        assert c.router.placer.config.prefill_policy == "round_robin"
        assert await status(c, "ann") == 401
        assert await status(c, "bob", model="best") == 200
        assert [queue.max_queue for queue in c.router.admission._queues.values()] == [3]
        assert await status(c, "bob", user="x" * 2000) == 413
        assert await status(c, "bob") == 200
        assert await status(c, "bob") == 429
        assert [len(d.calls), len(later.calls)] == [1, 2]
        go.set()
        assert "[DONE]" in await begun  # of a key and a node that are gone


async def test_a_fixed_setting_or_a_file_that_is_wrong_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d = prefill(), decode()
    async with reloading(p, d) as (c, file):
        good = file.config
        file.write(port=9, workers=2, alias=(f"best={MODEL}",))
        code, told = await c.operate("/admin/reload")
        assert (code, told["error"]["type"]) == (400, "invalid_request_error")
        assert told["error"]["message"].startswith(
            "port, workers cannot change while the router runs"
        )
        assert await status(c, "", model="best") == 404
        assert c.router.config == good

        def broken() -> RouterConfig:
            raise ConfigError("cannot read config file router.yaml: line 3 is not valid YAML")

        c.router._reread = broken  # type: ignore[attr-defined]
        code, told = await c.operate("/admin/reload")
        assert (code, "line 3 is not valid YAML" in told["error"]["message"]) == (400, True)
        assert await status(c, "") == 200


def test_all_keys_are_never_taken_away() -> None:
    key, other = KeyConfig("a", "0" * 64), KeyConfig("b", "1" * 64)
    for old in (
        RouterConfig(api_key="k"),
        RouterConfig(keys=(key,)),
        RouterConfig(api_key="k", keys=(key,)),
    ):
        with pytest.raises(ConfigError, match="no API keys"):
            changes(old, RouterConfig())
        for new in (
            RouterConfig(api_key="n"),
            RouterConfig(keys=(other,)),
            RouterConfig(api_key="k", keys=(other,)),
        ):
            changes(old, new)
    assert changes(RouterConfig(), RouterConfig(keys=(key,))) == ["keys"]


async def test_without_a_file_there_is_nothing_to_reload() -> None:
    async with router_over(RouterConfig(admin_key="operator")) as c:
        code, told = await c.operate("/admin/reload")
    assert (code, "started without --config" in told["error"]["message"]) == (400, True)


async def test_without_a_file_sighup_ends_the_router_as_it_should_and_so_does_sigterm() -> None:
    for number in (signal.SIGHUP, signal.SIGTERM):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(serve(RouterConfig(), [listening]))
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://127.0.0.1:{listening.getsockname()[1]}/live") as answer,
            ):
                assert answer.status == 200
            os.kill(os.getpid(), number)
            await asyncio.wait_for(serving, 10)  # and does not die of it
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


async def test_sighup_reloads_and_the_log_says_what_came_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = prefill(), decode()
    async with p.running(), d.running(), aiohttp.ClientSession() as http:
        file = File(p, d)
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            caplog.at_level("INFO", "kvrelay.router"),
        ):
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            serving = asyncio.create_task(serve(file.read(), [listening], file.read))
            try:
                await until(
                    lambda: any("node" in line and "is up" in line for line in caplog.messages)
                )
                file.write(alias=(f"best={MODEL}",))
                os.kill(os.getpid(), signal.SIGHUP)
                await until(lambda: "the configuration is reloaded, new: alias" in caplog.messages)
                async with http.get(f"{url}/v1/models") as answer:
                    assert "best" in [card["id"] for card in (await answer.json())["data"]]
                file.write(host="0.0.0.0")
                os.kill(os.getpid(), signal.SIGHUP)
                await until(
                    lambda: any(
                        "not reloaded: host cannot change" in line for line in caplog.messages
                    )
                )
            finally:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
