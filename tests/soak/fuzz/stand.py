"""The processes under fuzz, with every key, secret and port that there is; and what must stay as it
is in them.

Owns a prefill node, a decode node and a router with two workers on the loopback: which ports they
listen on, as /proc has it, what they hold, and one request whose answer is known. Refuses to know
what is sent to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp

from benchmarks.local_cluster import family, free_ports, kv_events
from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.node.process import PARENT_PID
from tests.listening import Port, listening
from tests.soak.chaos.model import flags_of

__all__ = ["Process", "Stand", "Usage"]

START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 40.0
ANSWER_DEADLINE_S = 60.0
LEASE_S = 5.0
_ROOT = Path(__file__).parents[3]
_PROMPT = "the tide comes in twice a day, and " * 8


@dataclass(frozen=True, slots=True)
class Usage:
    """A family's use of its machine: bytes of memory, open files (sockets among them), threads."""

    rss: int
    files: int
    threads: int


@dataclass(eq=False)
class Process:
    """One `kvrelay` command and its children."""

    role: str
    port: int
    popen: subprocess.Popen[bytes]
    log: Path
    kv_port: int = 0
    """The control channel's of its hand-overs; 0 for a router, which has none."""
    read: int = 0
    """Bytes of the log that were looked at."""
    born: dict[int, str] = field(default_factory=dict)
    """When each process of its family was started, once it was ready; in the kernel's ticks."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ages(self) -> dict[int, str]:
        """When each process of the family was started, of those that live."""
        ages = {}
        for pid in family(self.popen.pid):
            with contextlib.suppress(OSError):
                state, *_, started = (
                    Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
                )
                if state not in "ZX":
                    ages[pid] = started
        return ages

    def usage(self) -> Usage:
        rss = files = threads = 0
        for pid in family(self.popen.pid):
            with contextlib.suppress(OSError):
                rss += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                    "SC_PAGE_SIZE"
                )
                files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
                threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
        return Usage(rss, files, threads)

    def news(self) -> str:
        """Read what was logged since the last call."""
        with self.log.open("rb") as log:
            log.seek(self.read)
            told = log.read()
        self.read += len(told)
        return told.decode(errors="replace")


class Stand:
    """Start with `async with`; everything ends with it."""

    def __init__(
        self, folder: Path, tensor_parallel_size: int = 1, flags: Sequence[str] = ()
    ) -> None:
        """`flags`: of both nodes, beside those that they have."""
        self.folder, self.flags = folder, flags
        self.tensor_parallel_size = tensor_parallel_size
        self.secret = secrets.token_urlsafe()
        self.keys = {name: secrets.token_hex() for name in ("user", "admin", "node")} | {"": ""}
        (self.heartbeat_port,) = free_ports(1)
        self.processes: list[Process] = []
        self.expected = ""

    async def __aenter__(self) -> Stand:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_DEADLINE_S))
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGINT)
        until = time.monotonic() + STOP_DEADLINE_S
        for process in self.processes:
            try:
                await asyncio.to_thread(process.popen.wait, max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                for pid in reversed(family(process.popen.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.popen.wait(5)

    @property
    def router(self) -> Process:
        return self.processes[0]

    @property
    def nodes(self) -> list[Process]:
        return self.processes[1:]

    async def ask(
        self, process: Process, path: str, key: str, body: Any = None, **more: Any
    ) -> tuple[int, Any]:
        """Status and JSON of an answer. Raises aiohttp.ClientError, TimeoutError."""
        how = {"method": "GET" if body is None else "POST", **more}
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        async with self.session.request(
            url=process.url + path, json=body, headers=headers, **how
        ) as answer:
            return answer.status, await answer.json(content_type=None)

    async def canary(self, salt: str) -> str:
        """Ask the request whose answer is known. With a salt that was not used before no node
        has its KV: all of it is computed, and handed over."""
        body = {
            "model": "tiny",
            "prompt": _PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        body["cache_salt"] = salt
        status, told = await self.ask(self.router, "/v1/completions", "user", body)
        return told["choices"][0]["text"] if status == 200 else f"{status}: {told}"

    async def hold(self) -> LeaseId:
        """Have the prefill node hold KV for somebody."""
        name = f"held-{secrets.token_hex(4)}"
        body = {
            "model": "tiny",
            "prompt": _PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        body["kv_transfer_params"] = {"do_remote_decode": True}
        headers = {"authorization": f"Bearer {self.keys['node']}", "x-request-id": name}
        async with self.session.post(
            f"{self.nodes[0].url}/v1/completions", json=body, headers=headers
        ) as answer:
            told = await answer.json()
        if "kv_transfer_params" not in told:
            raise RuntimeError(f"the prefill node holds nothing: {told}")
        ticket = told["kv_transfer_params"]
        return LeaseId(str(ticket["remote_request_id"]), int(ticket["lease_epoch"]))

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[LeaseId]:
        """The same for the length of the block: its lease is renewed, and ends with the block at
        the latest.
        """
        held = await self.hold()

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_S / 4)
                await self.ask(
                    self.nodes[0], "/kv/renew", "node", {"request_ids": [held.request_id]}
                )

        renewing = asyncio.create_task(renew())
        try:
            yield held
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await self.ask(
                    self.nodes[0], "/kv/release", "node", {"request_ids": [held.request_id]}
                )

    async def state(self) -> dict[str, Any]:
        """All that nobody without a key may change."""
        _, told = await self.ask(self.router, "/admin/nodes", "admin")
        facts: tuple[str, ...] = (
            "url",
            "role",
            "kind",
            "up",
            "model",
            "adapters",
            "generation",
            "sources",
        )
        state: dict[str, Any] = {
            node["url"]: {fact: node[fact] for fact in facts} for node in told["nodes"]
        }
        for node in self.nodes:
            _, told = await self.ask(node, "/health", "")
            facts = (
                "status",
                "role",
                "model",
                "adapters",
                "engine_id",
                "generation",
                "held_blocks",
            )
            state[node.role] = {fact: told[fact] for fact in facts}
        return state

    async def metric(self, process: Process, name: str) -> float:
        """Sum of a metric over its labels."""
        async with self.session.get(f"{process.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((f"{name} ", f"{name}{{"))
        )

    async def set_right(self, before: Mapping[str, Any]) -> None:
        """Undo what those with a key may do: nodes that were added go, drained ones come back, held
        KV is free.
        """
        for node in self.nodes:
            await self.ask(node, "/undrain", "node", {})
        for url in set(await self.state()) - set(before):
            await self.ask(
                self.router, f"/admin/nodes?{urlencode({'url': url})}", "admin", method="DELETE"
            )

    def ended(self) -> list[str]:
        """Find who has lost processes of those at the beginning, with the end of its log."""
        return [
            f"{process.role}: processes {gone} have ended (code {process.popen.poll()}): "
            f"{process.news()[-1500:]}"
            for process in self.processes
            if (gone := sorted(pid for pid, _ in process.born.items() - process.ages().items()))
        ]

    def ports(self) -> list[Port]:
        """Every TCP port that any of the processes listens on."""
        pids = [pid for process in self.processes for pid in family(process.popen.pid)]
        return [port for port in listening(pids) if port.protocol == "tcp"]

    async def _start(self) -> None:
        model = [
            *flags_of("tiny", self.folder),
            "--cpu",
            "--threads",
            "1",
            "--kv-cache-memory-bytes",
            str(16 << 20),
        ]
        node = [
            *model,
            "--router",
            f"udp://127.0.0.1:{self.heartbeat_port}",
            "--lease-s",
            str(LEASE_S),
        ]
        ranks = (
            ["--tensor-parallel-size", str(self.tensor_parallel_size)]
            if self.tensor_parallel_size > 1
            else []
        )
        node += ["--enable-lora", "--allow-runtime-lora", "--tool-call-parser", "hermes"]
        node += ["--request-deadline-s", "50", *self.flags]
        node += [kv_events()]
        router = [
            "--heartbeat-port",
            str(self.heartbeat_port),
            "--node-allow",
            "127.0.0.1",
            "--workers",
            "2",
            "--strict-roles",
        ]
        self._launch("router", router)
        self._launch("prefill", [*node, *ranks])
        self._launch("decode", node)
        until = time.monotonic() + START_DEADLINE_S
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, KeyError):
                state = await self.state()
                if sum(entry.get("up", False) for entry in state.values()) == len(self.nodes):
                    break
            for process in self.processes:
                if process.popen.poll() is not None:
                    raise RuntimeError(f"{process.role} ended at start: {process.news()[-2000:]}")
            if time.monotonic() > until:
                raise RuntimeError(f"not up within {START_DEADLINE_S:g} s")
            await asyncio.sleep(0.1)
        self.expected = await self.canary("first")
        again = await self.canary(
            "first"
        )  # the KV that both nodes have cached gives the same answer
        if again != self.expected:
            raise RuntimeError(f"the canary says {again!r} after {self.expected!r}")
        for process in self.processes:
            process.born = process.ages()
            process.news()

    def _launch(self, role: str, flags: list[str]) -> None:
        port, kv_port = free_ports(2) if role != "router" else [*free_ports(1), 0]
        argv = [sys.executable, "-m", "kvrelay.cli", role, f"--port={port}", *flags]
        argv += [f"--kv-port={kv_port}"] if kv_port else []
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        env |= {PARENT_PID: str(os.getpid()), "KVRELAY_NODE_API_KEY": self.keys["node"]}
        if role == "router":
            env |= {"KVRELAY_API_KEY": self.keys["user"], "KVRELAY_ADMIN_KEY": self.keys["admin"]}
        else:
            env["KVRELAY_CLUSTER_SECRET"] = self.secret
        log = self.folder / f"{role}.log"
        with log.open("ab") as out:
            popen = subprocess.Popen(argv, stdout=out, stderr=out, env=env, cwd=self.folder)
        # If the machine runs out of memory in spite of all, it is one of these that its kernel
        # ends.
        Path(f"/proc/{popen.pid}/oom_score_adj").write_text("1000")
        self.processes.append(Process(role, port, popen, log, kv_port))
