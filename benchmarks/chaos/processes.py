"""The cluster's processes: started, struck by faults, started again by a supervisor, and ended.

Knows when each node was down, as the world saw it: from the blow until its next good health check.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos.faults import Fault

__all__ = ["Cluster", "Node", "Struck"]

START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 40.0
_LOOK_S = 0.05
_ROOT = Path(__file__).parents[2]


@dataclass(eq=False)
class Node:
    """One node, whatever process stands for it now."""

    role: str
    port: int
    argv: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    rest_s: float = 0.0
    ended_by_us: bool = False
    starts: int = 1
    down_since: float | None = None
    down: list[tuple[float, float]] = field(default_factory=list)
    """From when until when, on the monotonic clock."""

    @property
    def name(self) -> str:
        return f"{self.role}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def falls(self, now: float) -> None:
        """It is down from now on."""
        if self.down_since is None:
            self.down_since = now

    def rises(self, now: float) -> None:
        """It answers again."""
        if self.down_since is not None:
            self.down.append((self.down_since, now))
            self.down_since = None


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has happened to a node, at a monotonic second; `missed`: it was down already, and was spared."""

    at: float
    fault: Fault
    node: str
    url: str
    missed: bool


class Cluster:
    """Nodes of two roles and a router. Use as a context: everything ends with it."""

    def __init__(self, folder: Path, flags: Sequence[str], router_flags: Sequence[str]) -> None:
        self.folder, self.flags, self.router_flags = folder, list(flags), list(router_flags)
        self.nodes: list[Node] = []
        self.router: Node | None = None
        self.struck: list[Struck] = []
        self.surprises: list[str] = []
        """Processes that ended though nobody had struck them."""
        self.code: dict[str, Path] = {}
        """Other code than this checkout's, by the role of the processes that are started with it."""
        self._secret = secrets.token_urlsafe()
        self._tasks: list[asyncio.Task[None]] = []
        self._supervised = False

    async def start(self, prefill: int, decode: int, session: aiohttp.ClientSession) -> None:
        """Start all, and wait until the router serves. Raises RuntimeError."""
        self._session = session
        for role, count in (("prefill", prefill), ("decode", decode)):
            self.nodes += [self._launched(role, self.flags) for _ in range(count)]
        for node in self.nodes:
            await self._ready(node)
        peers = [f"--{node.role}={node.url}" for node in self.nodes]
        self.router = self._launched("router", [*peers, *self.router_flags])
        await self._ready(self.router)
        await self.seen_whole(START_DEADLINE_S)

    def supervise(self) -> None:
        """From now on start again what ends."""
        self._supervised = True
        assert self.router is not None
        self._tasks += [asyncio.create_task(self._keep(node)) for node in (*self.nodes, self.router)]

    async def strike(self, fault: Fault) -> None:
        """Do it, and wait until it is over: not for nodes that start again."""
        await asyncio.gather(*(self._strike(self.nodes[index], fault) for index in fault.nodes))

    async def whole(self) -> None:
        """Wait until every node is up again, and the router knows it. Raises RuntimeError."""
        for node in self.nodes:
            while node.process.poll() is not None or node.down_since is not None:
                await asyncio.sleep(_LOOK_S)
        await self.seen_whole(START_DEADLINE_S)

    async def seen_whole(self, within_s: float) -> None:
        """Wait until the router says that all nodes are up, and have met. Raises RuntimeError."""
        deadline, pairs = time.monotonic() + within_s, 1
        for role in ("prefill", "decode"):
            pairs *= sum(node.role == role for node in self.nodes)
        while time.monotonic() < deadline:
            assert self.router is not None
            told = await self.health(self.router)
            if told is not None and all(node["up"] for node in told["nodes"]):
                met = told["pairs"]
                if met["met"] + len(met["failed"]) >= pairs:
                    return
            await asyncio.sleep(_LOOK_S)
        raise RuntimeError(f"the router does not see all nodes up within {within_s:g} s: {told}")

    async def health(self, of: Node) -> dict[str, Any] | None:
        """The health report; None if there is none."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(f"{of.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                told: dict[str, Any] = await answer.json()
                return told if answer.status == 200 else None
        return None

    async def metrics(self) -> dict[str, float]:
        """The router's, of those without labels."""
        assert self.router is not None
        async with self._session.get(f"{self.router.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {name: float(value) for name, _, value in (line.partition(" ") for line in lines) if name.isidentifier()}

    def router_rss(self) -> int:
        """Bytes of memory of the router's process."""
        assert self.router is not None
        pages = int(Path(f"/proc/{self.router.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def stop(self) -> None:
        """End every process that was started here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        every = [*self.nodes, *([self.router] if self.router else [])]
        for node in every:
            if node.process.poll() is None:
                for pid in _family(node.process.pid):
                    _signal(pid, signal.SIGCONT)
                node.process.terminate()
        deadline = time.monotonic() + STOP_DEADLINE_S
        for node in every:
            try:
                await asyncio.to_thread(node.process.wait, max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for pid in reversed(_family(node.process.pid)):
                    _signal(pid, signal.SIGKILL)
                node.process.wait(5)

    async def _strike(self, node: Node, fault: Fault) -> None:
        now = time.monotonic()
        family = [] if node.down_since is not None else _family(node.process.pid)
        if "engine" in fault.kind:
            family = family[1:]
        missed = not family
        self.struck.append(Struck(now, fault, node.name, node.url, missed))
        if missed:
            return
        node.falls(now)
        if fault.kind.startswith("stop"):
            try:
                for pid in family:
                    _signal(pid, signal.SIGSTOP)
                await asyncio.sleep(fault.for_s)
            finally:
                for pid in family:
                    _signal(pid, signal.SIGCONT)
            await self._ready(node)
            return
        node.ended_by_us, node.rest_s = True, fault.rest_s
        how = signal.SIGTERM if fault.kind == "restart" else signal.SIGKILL
        for pid in family[:1] if fault.kind == "restart" else family:
            _signal(pid, how)

    async def _keep(self, node: Node) -> None:
        """The supervisor of one process."""
        while True:
            if node.process.poll() is None:
                await asyncio.sleep(_LOOK_S)
                continue
            node.falls(time.monotonic())
            if not node.ended_by_us:
                self.surprises.append(f"{node.name} ended with code {node.process.returncode}: {_tail(node.log)}")
            await asyncio.sleep(node.rest_s)
            node.ended_by_us = False
            node.starts += 1
            node.process = self._popen(node.argv, node.log, node.role)
            await self._ready(node)

    async def _ready(self, node: Node) -> None:
        """Wait until the process of now is healthy, or has ended while somebody looks after it. Raises RuntimeError."""
        deadline, process = time.monotonic() + START_DEADLINE_S, node.process
        while process is node.process:
            if process.poll() is not None:
                if self._supervised:
                    return
                raise RuntimeError(f"{node.name} ended at start: {_tail(node.log)}")
            if await self.health(node) is not None:
                node.rises(time.monotonic())
                return
            if time.monotonic() > deadline:
                self.surprises.append(f"{node.name} is not healthy {START_DEADLINE_S:g} s later: {_tail(node.log)}")
                return
            await asyncio.sleep(2 * _LOOK_S)

    def _launched(self, role: str, flags: Sequence[str]) -> Node:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        argv = [sys.executable, "-m", "kvrelay.cli", role, f"--port={port}", *flags]
        log = self.folder / f"{role}-{port}.log"
        return Node(role, port, argv, log, self._popen(argv, log, role))

    def _popen(self, argv: Sequence[str], log: Path, role: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(self.code.get(role, _ROOT)), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if role != "router":
            env["KVRELAY_CLUSTER_SECRET"] = self._secret
        with log.open("ab") as out:
            return subprocess.Popen(argv, stdout=out, stderr=out, env=env, cwd=self.folder)


def _family(pid: int) -> list[int]:
    """A process and its children, the engine among them."""
    found = [pid]
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def _signal(pid: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, how)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]
