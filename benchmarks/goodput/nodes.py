"""The processes that are measured: `kvrelay up`, or as many `kvrelay serve` as there are GPUs;
started, flipped, ended.

Owns processes and roles; knows no load.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.goodput.works import flips_to
from benchmarks.local_cluster import free_ports
from kvrelay.cluster_plan import ADMIN_KEY, NODE_API_KEY, ClusterConfig, gpus_of_nodes
from kvrelay.drawn_keys import stored_key
from kvrelay.machine import this_machine
from kvrelay.node.process import PARENT_PID
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.router_config import RouterConfig

__all__ = ["Nodes", "cluster", "gpus_taken", "router_cpu_s", "servers"]

START_DEADLINE_S = 400.0
_STOP_S, _FLIP_S, _TICK_S = 40.0, 60.0, 0.25
_CALL = aiohttp.ClientTimeout(total=10.0)


class Nodes:
    """Up and ready. `router` is empty where there is none; `key` is what the nodes want of those
    who ask them; `gpus` is what all of them compute on.
    """

    def __init__(
        self, router: str, urls: Sequence[str], key: str, started_s: float, gpus: int
    ) -> None:
        self.router, self.urls, self.key, self.started_s, self.gpus = (
            router,
            list(urls),
            key,
            started_s,
            gpus,
        )

    async def have(self, prefill: int) -> bool:
        """Have so many of them be prefill nodes, all others decode nodes; whether any was not.
        Raises RuntimeError if one of them is not up.
        """
        async with aiohttp.ClientSession(timeout=_CALL) as session:
            flips = flips_to(await self._roles(session), prefill)
            for url, role in flips:
                said = {"url": url, "role": role, "force": True}
                headers = operator(self.router)
                async with session.post(
                    f"{self.router}/admin/nodes/role", json=said, headers=headers
                ) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{url} does not become {role}: {await answer.text()}")
            await self._roles(session, prefill)
        return bool(flips)

    async def _roles(
        self, session: aiohttp.ClientSession, prefill: int | None = None
    ) -> dict[str, str]:
        """Of all, once each is up and none changes; and so many are prefill nodes. Raises
        RuntimeError if that takes too long.
        """
        until = time.monotonic() + _FLIP_S
        while True:
            rows = await nodes_of(session, self.router)
            roles = {
                row["url"]: row["role"] for row in rows if row["up"] and row["flips_to"] is None
            }
            if len(roles) == len(self.urls) and prefill in (
                None,
                list(roles.values()).count("prefill"),
            ):
                return roles
            if time.monotonic() > until:
                raise RuntimeError(
                    f"of the nodes {self.urls} these are up after {_FLIP_S:g} s: {roles}"
                )
            await asyncio.sleep(_TICK_S)


def operator(router: str) -> dict[str, str]:
    """What a router of ours wants to be told by its operator."""
    return {"authorization": f"Bearer {os.environ.get(ADMIN_KEY) or stored_key('admin', router)}"}


async def nodes_of(session: aiohttp.ClientSession, router: str) -> list[dict[str, Any]]:
    """What a router tells of its nodes."""
    async with session.get(f"{router}/admin/nodes", headers=operator(router)) as answer:
        answer.raise_for_status()
        return list((await answer.json())["nodes"])


@asynccontextmanager
async def cluster(
    prefill: int, decode: int, flags: Sequence[str], router_flags: Sequence[str], logs: Path
) -> AsyncIterator[Nodes]:
    """`kvrelay up`, and a router with `router_flags` before its nodes, which keep their roles.
    Raises RuntimeError.
    """
    began, key = time.monotonic(), secrets.token_urlsafe(24)
    port, other = free_ports(2)
    environment = child_environ() | {NODE_API_KEY: key}
    words = [
        f"--prefill={prefill}",
        f"--decode={decode}",
        f"--port={port}",
        f"--log-dir={logs}",
        *flags,
    ]
    words.append("--strict-roles")
    async with _running([("up", words, environment, port)], logs):
        async with aiohttp.ClientSession(timeout=_CALL) as session:
            rows = await nodes_of(session, f"http://127.0.0.1:{port}")
            urls = [row["url"] for row in rows]
            gpus = gpus_taken([await _ranks(session, url) for url in urls], _visible(flags))
        keep = [f"--least-{role}={prefill + decode}" for role in ("prefill", "decode")]
        named = [f"--{row['role']}={row['url']}" for row in rows]
        words = [f"--port={other}", *named, *keep, *router_flags]
        async with _running([("router", words, environment, other)], logs):
            yield Nodes(f"http://127.0.0.1:{other}", urls, key, time.monotonic() - began, gpus)


@asynccontextmanager
async def servers(count: int, flags: Sequence[str], logs: Path) -> AsyncIterator[Nodes]:
    """So many `kvrelay serve`, each with a GPU of its own if there are any. Raises RuntimeError."""
    began, key = time.monotonic(), secrets.token_urlsafe(24)
    gpus = _visible(flags)
    asked = []
    for at, port in enumerate(free_ports(count)):
        environment = child_environ() | {NODE_API_KEY: key}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[at % len(gpus)]
        asked.append(("serve", [f"--port={port}", *flags], environment, port))
    async with _running(asked, logs):
        urls = [f"http://127.0.0.1:{port}" for *_, port in asked]
        yield Nodes("", urls, key, time.monotonic() - began, gpus_taken([1] * count, gpus))


def gpus_taken(ranks: Sequence[int], visible: Sequence[str]) -> int:
    """How many GPUs nodes of so many ranks compute on; where there are none each rank stands for
    one.
    """
    taken = gpus_of_nodes(ranks, visible) if visible else []
    return len({gpu for node in taken for gpu in node.visible.split(",")}) or sum(ranks)


def _visible(flags: Sequence[str]) -> Sequence[str]:
    """GPUs of this machine that nodes with these flags may use."""
    if {"--cpu", "--device=cpu"} & set(flags):
        return ()
    return this_machine(ClusterConfig(NodeConfig(EngineConfig("none")), RouterConfig(port=0))).gpus


async def _ranks(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/health") as answer:
        return int((await answer.json())["kv"]["fingerprint"]["tp_size"])


@asynccontextmanager
async def _running(
    asked: Sequence[tuple[str, list[str], dict[str, str], int]], logs: Path
) -> AsyncIterator[None]:
    """These commands of ours, until the block is left; whatever happens, none of them is left."""
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)  # `kvrelay up` takes no other
    children: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for number, (command, words, environment, _) in enumerate(asked):
            path = logs / f"{command}-{number}.out"
            with path.open("wb") as log:
                argv = [sys.executable, "-m", "kvrelay.cli", command, *words]
                tied = environment | {PARENT_PID: str(os.getpid())}
                children.append((subprocess.Popen(argv, stdout=log, stderr=log, env=tied), path))
        async with (
            asyncio.timeout(START_DEADLINE_S),
            aiohttp.ClientSession(timeout=_CALL) as session,
        ):
            for (child, path), (*_, port) in zip(children, asked, strict=True):
                await _ready(session, f"http://127.0.0.1:{port}/health", child, path)
        yield
    finally:
        for child, _ in children:
            with suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        until = time.monotonic() + _STOP_S
        for child, _ in children:
            try:
                child.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def _ready(
    session: aiohttp.ClientSession, url: str, child: subprocess.Popen[bytes], log: Path
) -> None:
    while True:
        if child.poll() is not None:
            raise RuntimeError(
                f"it ended with code {child.returncode} before it was ready:\n{_tail(log)}"
            )
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(url) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(_TICK_S)


def _tail(log: Path) -> str:
    return log.read_bytes()[-3000:].decode(errors="replace")


def router_cpu_s(router: str) -> float:
    """Seconds of CPU that the router at this address has taken, its workers included; 0 where there
    is none.
    """
    port, tick = router.rpartition(":")[2].encode(), os.sysconf("SC_CLK_TCK")
    seen: dict[int, tuple[int, float]] = {}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            seen[int(folder.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / tick
            if b"router" in words and any(word.endswith(port) for word in words if word):
                found.add(int(folder.name))
    return (
        sum(cpu_s for pid, (parent, cpu_s) in seen.items() if pid in found or parent in found)
        if router
        else 0.0
    )
