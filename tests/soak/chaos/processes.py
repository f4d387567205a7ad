"""The cluster's processes: started, struck, started again by a supervisor, and ended.

Knows when each was down, as the world saw it: from the blow until its next good health check; and
when it was cut off or badly connected, which others do to it (strikes.py).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.local_cluster import family, free_ports
from kvrelay.node.process import PARENT_PID
from tests.soak.chaos.faults import Fault
from tests.soak.chaos.logs import Logs
from tests.soak.chaos.proxies import Proxies
from tests.soak.chaos.shim import Shim

__all__ = ["Cluster", "Node", "Struck", "family"]

HOST = "127.0.0.1"
START_DEADLINE_S = 300.0
LATEST_S = 15.0
"""A node that the router has not taken again so long after it was healthy is lost."""
STOP_DEADLINE_S = 40.0
_LOOK_S = 0.05
_LONGEST_REST_S = 30.0
"""Of the supervisor, if a process ends again and again."""
_ROOT = Path(__file__).parents[3]


@dataclass(eq=False)
class Node:
    """One node, or the router, whatever process stands for it now."""

    name: str
    role: str
    ports: tuple[int, ...]
    """HTTP and control channel; of a router the first."""
    argv: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    rest_s: float = 0.0
    ended_by_us: bool = False
    down_since: float | None = None
    down: list[tuple[float, float]] = field(default_factory=list)
    """From when until when, on the monotonic clock."""
    away: list[tuple[float, float]] = field(default_factory=list)
    """When its network was bad."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports[0]}"

    def was_down(self, begin: float, end: float) -> bool:
        still = self.down_since is not None and self.down_since <= end
        return still or any(a <= end and begin <= b for a, b in self.down)

    def falls(self, now: float) -> None:
        if self.down_since is None:
            self.down_since = now

    def rises(self, now: float) -> None:
        if self.down_since is not None:
            self.down.append((self.down_since, now))
            self.down_since = None


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has happened to a node, at a monotonic second; `missed`: it was down already."""

    at: float
    fault: Fault
    node: str
    missed: bool = False


class Cluster:
    """Nodes of two roles and a router."""

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        router_flags: Sequence[str],
        shim: Shim | None = None,
    ) -> None:
        self.folder, self.flags, self.router_flags = folder, list(flags), list(router_flags)
        self.shim, self.logs = shim, Logs()
        self.proxies = Proxies() if shim is not None and shim.there else None
        self.nodes: list[Node] = []
        self.router: Node
        self.struck: list[Struck] = []
        self.surprises: list[str] = []
        """Processes that ended though nobody had struck them."""
        self.code: dict[str, Path] = {}
        """Another checkout, by the role of the processes that are started from it."""
        self.env: dict[str, dict[str, str]] = {}
        """Further variables of processes, by their role."""
        self.secret = secrets.token_urlsafe()
        self._tasks: list[asyncio.Task[None]] = []
        self._supervised = False

    @property
    def every(self) -> list[Node]:
        """The nodes, and the router as soon as there is one."""
        return [*self.nodes, *([self.router] if hasattr(self, "router") else [])]

    async def start(self, prefill: int, decode: int, session: aiohttp.ClientSession) -> None:
        """Start all, and wait until the router serves. Raises RuntimeError."""
        self._session = session
        roles = {
            f"{role}{at}": role
            for role, count in (("prefill", prefill), ("decode", decode))
            for at in range(count)
        }
        free = iter(free_ports(2 * len(roles) + 1))
        ports = {name: (next(free), next(free)) for name in roles} | {"router": (next(free),)}
        if self.proxies is not None:
            await self.proxies.join(ports)
        self.nodes = [
            self._launched(name, role, ports[name], self.flags) for name, role in roles.items()
        ]
        for node in self.nodes:
            await self._ready(node)
        peers = [f"--{node.role}={node.url}" for node in self.nodes]
        self.router = self._launched(
            "router", "router", ports["router"], [*peers, *self.router_flags]
        )
        await self._ready(self.router)
        await self.seen_whole(START_DEADLINE_S)

    def supervise(self) -> None:
        self._supervised = True
        self._tasks += [
            asyncio.create_task(self._keep(node), name=node.name) for node in self.every
        ]

    async def strike(self, fault: Fault) -> None:
        """Do it to processes, and wait until it is over: not for those that start again."""
        await asyncio.gather(*(self._strike(node, fault) for node in self.struck_by(fault)))

    def struck_by(self, fault: Fault) -> list[Node]:
        """Return whom it concerns: the router without a number of a node, and for number -1."""
        return [self.nodes[index] if index >= 0 else self.router for index in fault.nodes or (-1,)]

    def note(self, fault: Fault, nodes: Sequence[Node], *, missed: bool | None = None) -> None:
        now = time.monotonic()
        self.struck += [
            Struck(
                now,
                fault,
                node.name,
                node.down_since is not None if missed is None else missed,
            )
            for node in nodes
        ]

    async def whole(self) -> None:
        """Wait until every node is up again, and the router knows it. Raises RuntimeError."""
        while (told := self.lost()) or any(
            node.process.poll() is not None or node.down_since for node in self.every
        ):
            if told:
                raise RuntimeError(told)
            await asyncio.sleep(_LOOK_S)
        await self.seen_whole(LATEST_S)

    def lost(self) -> str:
        """Why not all of them will be up again; empty if they may."""
        for task in self._tasks:
            if task.done():
                return f"the supervisor of {task.get_name()} has failed: {task.exception()!r}"
        for node in self.every:
            if (
                node.down_since is not None
                and time.monotonic() - node.down_since > START_DEADLINE_S
            ):
                return f"{node.name} is down for {START_DEADLINE_S:g} s: {_tail(node.log)}"
        return ""

    async def seen_whole(self, within_s: float) -> None:
        """Wait until the router says that all nodes are up. Raises RuntimeError."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            told = await self.health(self.router)
            if told is not None and all(node["up"] for node in told["nodes"]):
                return
            await asyncio.sleep(_LOOK_S)
        raise RuntimeError(f"the router does not see all nodes up within {within_s:g} s: {told}")

    async def health(self, of: Node, *, any_status: bool = False) -> dict[str, Any] | None:
        """The health report; None if there is none, or if it is not 200 and that matters."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(
                f"{of.url}/health", timeout=aiohttp.ClientTimeout(total=5)
            ) as answer:
                told: dict[str, Any] = await answer.json()
                return told if answer.status == 200 or any_status else None
        return None

    async def metrics(self, of: Node) -> dict[str, float]:
        """Sums over the labels; nothing of a process that does not answer."""
        found: dict[str, float] = {}
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(
                f"{of.url}/metrics", timeout=aiohttp.ClientTimeout(total=5)
            ) as answer:
                for line in (await answer.text()).splitlines():
                    name, _, value = line.rpartition(" ")
                    if not name.startswith("#"):
                        name = name.partition("{")[0]
                        found[name] = found.get(name, 0.0) + float(value)
        return found

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.every:
            if node.process.poll() is None:
                for pid in family(node.process.pid):
                    _signal(pid, signal.SIGCONT)
                node.process.terminate()
        deadline = time.monotonic() + STOP_DEADLINE_S
        for node in self.every:
            try:
                await asyncio.to_thread(node.process.wait, max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for pid in reversed(family(node.process.pid)):
                    _signal(pid, signal.SIGKILL)
                node.process.wait(STOP_DEADLINE_S)
        if self.proxies is not None:
            await self.proxies.close()
        self.logs.close()

    async def _strike(self, node: Node, fault: Fault) -> None:
        now = time.monotonic()
        pids = [] if node.down_since is not None else family(node.process.pid)
        if "engine" in fault.kind:
            pids = pids[1:]
        missed = not pids
        self.struck.append(Struck(now, fault, node.name, missed))
        if missed:
            return
        if fault.kind != "stop router":  # nothing is lost with that one
            node.falls(now)
        if fault.kind.startswith("stop"):
            try:
                for pid in pids:
                    _signal(pid, signal.SIGSTOP)
                await asyncio.sleep(fault.for_s)
            finally:
                for pid in pids:
                    _signal(pid, signal.SIGCONT)
            if node is self.router:
                node.away.append((now, time.monotonic()))
            await self._ready(node)
            return
        node.ended_by_us, node.rest_s = True, 0.0
        gently = fault.kind.startswith("restart")
        for pid in pids[:1] if gently else pids:
            _signal(pid, signal.SIGTERM if gently else signal.SIGKILL)

    async def _keep(self, node: Node) -> None:
        while True:
            if node.process.poll() is None:
                await asyncio.sleep(_LOOK_S)
                continue
            node.falls(time.monotonic())
            if not node.ended_by_us:
                self.surprises.append(
                    f"{node.name} ended with code {node.process.returncode}: {_tail(node.log)}"
                )
                node.rest_s = min(2 * node.rest_s + 1.0, _LONGEST_REST_S)
            await asyncio.sleep(node.rest_s)
            node.ended_by_us = False
            node.process = self._popen(node.argv, node.log, node.name, node.role)
            await self._ready(node)

    async def _ready(self, node: Node) -> None:
        """Wait until the process of now is healthy, or has ended while somebody looks after it.
        Raises RuntimeError.
        """
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
                self.surprises.append(
                    f"{node.name} is not healthy {START_DEADLINE_S:g} s later: {_tail(node.log)}"
                )
                return
            await asyncio.sleep(2 * _LOOK_S)

    def _launched(self, name: str, role: str, ports: tuple[int, ...], flags: Sequence[str]) -> Node:
        argv = [sys.executable, "-m", "kvrelay.cli", role, f"--host={HOST}", f"--port={ports[0]}"]
        if role != "router":
            argv += [f"--kv-host={HOST}", f"--kv-port={ports[1]}"]
        argv += flags
        log = self.folder / f"{name}.log"
        return Node(name, role, ports, argv, log, self._popen(argv, log, name, role))

    def _popen(
        self, argv: Sequence[str], log: Path, name: str, role: str
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(self.code.get(role, _ROOT)), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        env |= {PARENT_PID: str(os.getpid()), **self.env.get(role, {})}
        if role != "router":
            env["KVRELAY_CLUSTER_SECRET"] = self.secret
        if self.shim is not None and self.proxies is not None:
            env |= self.shim.environment(name, self.proxies.links(name))
        out = self.logs.pipe(log)
        try:
            return subprocess.Popen(argv, stdout=out, stderr=out, env=env, cwd=self.folder)
        finally:
            os.close(out)


def _signal(pid: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, how)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]
