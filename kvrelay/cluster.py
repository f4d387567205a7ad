"""`kvrelay up`: runs a local cluster in the order start, ready, proof, wait, stop."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.text import Text

from kvrelay.chat import answer, first_model, http_session
from kvrelay.cluster_plan import (
    ClusterConfig,
    Machine,
    plan,
    reachable,
    waves,
)
from kvrelay.machine import this_machine
from kvrelay.node.process import private_folder
from kvrelay.supervisor import Child, ChildSpec, Supervisor, until_stopped
from kvrelay.terminal import plain_console

__all__ = ["up"]

_HEALTH_DEADLINE_S = 2.0
_PROOF = "In one or two sentences: what is a key-value cache?"


def up(config: ClusterConfig, planned: Callable[..., list[ChildSpec]] = plan) -> int:
    """Run the cluster until Ctrl-C or SIGTERM and return 0. Raises ConfigError, ChildFailed."""
    with this_machine(config) as machine:
        return _up(config, machine, planned)


def _up(config: ClusterConfig, machine: Machine, planned: Callable[..., list[ChildSpec]]) -> int:
    console, log_dir, router = plain_console(), _log_dir(config), config.router
    drawn = "" if router.admin_key else secrets.token_urlsafe(24)
    # They are drawn here: a process that is started again keeps them.
    router = replace(
        router,
        port=machine.ports[0],
        admin_key=router.admin_key or drawn,
        node_api_key=router.node_api_key or secrets.token_urlsafe(24),
    )
    config = replace(config, router=router)
    specs = planned(config, machine, log_dir)
    console.print(
        f"starting {config.prefill} prefill, {config.decode} decode and a router; logs in {log_dir}"
    )
    # The router comes last, so that it need not warn of nodes that still load.
    return asyncio.run(_run(config, [*waves(specs[:-1], machine), specs[-1:]], drawn, console))


async def _run(
    config: ClusterConfig,
    steps: Sequence[Sequence[ChildSpec]],
    drawn: str,
    console: Console,
) -> int:
    async def work() -> None:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session,
            Supervisor(
                lambda spec: _answers(session, spec.health_url),
                lambda line: console.print(Text(line)),
                config.node.start_deadline_s,
                config.stop_deadline_s,
            ) as supervisor,
        ):
            try:
                await _serve(config, console, supervisor, steps, drawn)
            finally:
                console.print("stopping")

    await until_stopped(work())
    console.print("all processes have ended")
    return 0


async def _serve(
    config: ClusterConfig,
    console: Console,
    supervisor: Supervisor,
    steps: Sequence[Sequence[ChildSpec]],
    drawn: str,
) -> None:
    for step in steps:
        await _all_ready(console, [supervisor.start(spec) for spec in step])
    url, key = reachable(config.router), config.router.api_key
    async with http_session(url, key, verify=False) as http:
        model = await first_model(http)
        _invite(console, url, model, drawn, has_key=bool(key))
        if config.demo or config.demo_exit:
            console.print(f"[bold]>[/] {_PROOF}")
            await answer(http, model, [{"role": "user", "content": _PROOF}])
    if not config.demo_exit:
        console.print("Ctrl-C stops everything.")
        await supervisor.watch()


async def _all_ready(console: Console, children: Sequence[Child]) -> None:
    waiting = [child.spec.name for child in children]

    async def one(child: Child) -> None:
        took_s = await child.ready
        waiting.remove(child.spec.name)
        console.print(
            f"{child.spec.name} is ready after {took_s:.1f} s: "
            f"{child.spec.health_url.removesuffix('/health')}"
        )
        status.update(f"waiting for {', '.join(waiting)}")

    with console.status(f"waiting for {', '.join(waiting)}") as status:
        pending = [asyncio.create_task(one(child)) for child in children]
        try:
            await asyncio.gather(*pending)
        finally:
            for task in pending:
                task.cancel()


def _invite(console: Console, url: str, model: str, drawn: str, *, has_key: bool) -> None:
    watch = f"{url}/console" + (f"#key={drawn}" if drawn and console.is_terminal else "")
    key = "  -H 'Authorization: Bearer YOUR_KEY' \\\n" if has_key else ""
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    console.print(
        Text(
            f"\nkvrelay is ready: {url}/v1 (model {model})\nwatch it, chat with it: {watch}\n\n"
            f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
            f"{key}  -d '{body}'\n"
        )
    )


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(
            url, timeout=aiohttp.ClientTimeout(total=_HEALTH_DEADLINE_S)
        ) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _log_dir(config: ClusterConfig) -> Path:
    if not config.log_dir:
        return Path(tempfile.mkdtemp(prefix="kvrelay-logs-"))
    folder = Path(config.log_dir).expanduser().absolute()
    private_folder(folder)
    return folder
