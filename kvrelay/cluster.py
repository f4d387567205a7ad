"""`kvrelay up`: runs a local cluster in the order start, ready, proof, wait, stop."""

from __future__ import annotations

import asyncio
import secrets
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.text import Text

from kvrelay.chat import Endpoint, open_session, proof
from kvrelay.cluster_plan import (
    ClusterConfig,
    plan,
    reachable,
    waves,
)
from kvrelay.drawn_keys import Kind, drawn_key
from kvrelay.machine import this_machine
from kvrelay.node.process import private_folder
from kvrelay.supervisor import Child, ChildSpec, Supervisor

__all__ = ["up"]

_HEALTH_DEADLINE_S = 2.0


def up(config: ClusterConfig, planned: Callable[..., list[ChildSpec]] = plan) -> int:
    """Run the cluster until Ctrl-C or SIGTERM and return 0; no child is left in any case.

    Raises ConfigError, and ChildFailed if a process does not get ready.
    """
    machine, console = this_machine(config), Console(highlight=False, soft_wrap=True)
    log_dir, router = _log_dir(config), config.router

    def drawn(kind: Kind, given: str) -> AbstractContextManager[str]:
        return nullcontext("") if given else drawn_key(kind, machine.ports[0])

    # They are drawn here: a process that is started again keeps them.
    with drawn("admin", router.admin_key) as admin, drawn("nodes", router.node_api_key) as nodes:
        router = replace(
            router,
            port=machine.ports[0],
            admin_key=router.admin_key or admin,
            node_api_key=router.node_api_key or nodes or secrets.token_urlsafe(24),
        )
        config = replace(config, router=router)
        specs = planned(config, machine, log_dir)
        console.print(
            f"starting {config.prefill} prefill, {config.decode} decode and a router; logs in "
            f"{log_dir}"
        )
        # The router comes last, so that it need not warn of nodes that still load.
        steps = [*waves(specs[:-1], machine), specs[-1:]]
        return asyncio.run(_run(config, steps, admin, console))


async def _run(
    config: ClusterConfig,
    steps: Sequence[Sequence[ChildSpec]],
    drawn: str,
    console: Console,
) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def say(line: str) -> None:
        console.print(Text(line))

    async with open_session(verify=False) as session:

        async def healthy(url: str) -> bool:
            return await _answers(session, url)

        async with Supervisor(
            healthy, say, config.node.start_deadline_s, config.stop_deadline_s
        ) as supervisor:
            serving = asyncio.create_task(_serve(config, console, supervisor, steps, drawn))
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()  # raises what went wrong
            finally:
                serving.cancel()
                stopped.cancel()
                await asyncio.gather(serving, stopped, return_exceptions=True)
                console.print("stopping")
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
    endpoint = Endpoint(reachable(config.router), config.router.api_key)
    async with open_session(verify=False) as session:
        _invite(console, endpoint, await endpoint.model(session), drawn)
        if config.demo or config.demo_exit:
            await proof(session, endpoint, console)
    if not config.demo_exit:
        console.print("Ctrl-C stops everything.")
        await asyncio.Event().wait()


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


def _invite(console: Console, endpoint: Endpoint, model: str, drawn: str) -> None:
    watch = f"{endpoint.url}/console" + (f"#key={drawn}" if drawn and console.is_terminal else "")
    key = "  -H 'Authorization: Bearer YOUR_KEY' \\\n" if endpoint.api_key else ""
    body = (
        f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": '
        f'"Hello!"}}]}}'
    )
    lines = (
        f"\nkvrelay is ready: {endpoint.url}/v1 (model {model})\nwatch it, chat with it: "
        f"{watch}\n\ncurl -N {endpoint.url}/v1/chat/completions -H 'content-type: "
        f"application/json' \\\n{key}  -d '{body}'\n"
    )
    console.print(Text(lines))


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
