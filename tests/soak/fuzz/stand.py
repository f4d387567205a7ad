"""The cluster under fuzz, with every key, secret and port that there is; and what must stay as it is
in it: what nodes hold, who has ended, and one request whose answer is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.local_cluster import family, free_ports
from kvrelay.kv_transfer.connector import LeaseId
from tests.cluster.real_cluster import attentive_model
from tests.listening import Port, listening
from tests.soak.chaos.asks import CONTEXT
from tests.soak.chaos.left_behind import Size, size_of
from tests.soak.chaos.processes import Cluster, Node

__all__ = ["Stand"]

ANSWER_DEADLINE_S = 60.0
LEASE_S = 5.0
_BODY = {
    "model": "tiny",
    "prompt": "the tide comes in twice a day, and " * 8,
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}
_OF_ROUTER = ("url", "role", "kind", "up", "model", "adapters", "generation")
_OF_NODES = ("status", "role", "model", "adapters", "engine_id", "generation", "held_blocks")


class Stand:
    """A prefill node, a decode node and a router with two workers, for an `async with`."""

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.keys = {name: secrets.token_hex() for name in ("user", "admin", "node")} | {"": ""}
        (self.heartbeat_port,) = free_ports(1)
        node = f"""--lease-s {LEASE_S}
            --router udp://127.0.0.1:{self.heartbeat_port} --enable-lora --allow-runtime-lora
            --tool-call-parser hermes --request-deadline-s 50"""
        router = f"--heartbeat-port {self.heartbeat_port} --workers 2 --strict-roles"
        self.cluster = Cluster(
            folder,
            [*attentive_model(folder, CONTEXT, kv_mib=16), *node.split(), *flags],
            router.split(),
        )
        self.secret = self.cluster.secret
        key = {"KVRELAY_NODE_API_KEY": self.keys["node"]}
        router_keys = {
            "KVRELAY_API_KEY": self.keys["user"],
            "KVRELAY_ADMIN_KEY": self.keys["admin"],
        }
        self.cluster.env = {"prefill": key, "decode": key, "router": key | router_keys}
        self.expected = ""
        self._read: dict[Node, int] = {}
        self._born: dict[Node, set[int]] = {}

    async def __aenter__(self) -> Stand:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_DEADLINE_S))
        try:
            await self.cluster.start(1, 1, self.session)
            for process in self.processes:
                # If the machine runs out of memory in spite of all, its kernel ends one of these.
                Path(f"/proc/{process.process.pid}/oom_score_adj").write_text("1000")
            self.expected = await self.canary("first")
            again = await self.canary("first")  # by the KV that both nodes have cached
            if again != self.expected:
                raise RuntimeError(f"the canary says {again!r} after {self.expected!r}")
            for process in self.processes:
                self._born[process] = _alive(process)
                self.news(process)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.cluster.stop()

    @property
    def router(self) -> Node:
        return self.cluster.router

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    @property
    def processes(self) -> list[Node]:
        return [self.router, *self.nodes]

    async def ask(
        self, process: Node, path: str, key: str, body: Any = None, **more: Any
    ) -> tuple[int, Any]:
        """Status and JSON of an answer. Raises aiohttp.ClientError, TimeoutError."""
        how = {"method": "GET" if body is None else "POST", **more}
        headers = {"authorization": f"Bearer {self.keys[key]}", **how.pop("headers", {})}
        async with self.session.request(
            url=process.url + path, json=body, headers=headers, **how
        ) as answer:
            return answer.status, await answer.json(content_type=None)

    async def canary(self, salt: str) -> str:
        """Ask the request whose answer is known."""
        body = _BODY | {"cache_salt": salt}
        status, told = await self.ask(self.router, "/v1/completions", "user", body)
        return told["choices"][0]["text"] if status == 200 else f"{status}: {told}"

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[LeaseId]:
        """Have the prefill node hold KV for the length of the block: its lease is renewed, and ends
        with the block at the latest.
        """
        prefill, body = self.nodes[0], _BODY | {"kv_transfer_params": {"do_remote_decode": True}}
        headers = {"x-request-id": f"held-{secrets.token_hex(4)}"}
        _, told = await self.ask(prefill, "/v1/completions", "node", body, headers=headers)
        if "kv_transfer_params" not in told:
            raise RuntimeError(f"the prefill node holds nothing: {told}")
        ticket = told["kv_transfer_params"]
        held = LeaseId(str(ticket["remote_request_id"]), int(ticket["lease_epoch"]))
        ids = {"request_ids": [held.request_id]}

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_S / 4)
                await self.ask(prefill, "/kv/renew", "node", ids)

        renewing = asyncio.create_task(renew())
        try:
            yield held
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await self.ask(prefill, "/kv/release", "node", ids)

    async def state(self) -> dict[str, Any]:
        _, told = await self.ask(self.router, "/admin/nodes", "admin")
        state: dict[str, Any] = {
            node["url"]: {fact: node[fact] for fact in _OF_ROUTER} for node in told["nodes"]
        }
        for node in self.nodes:
            _, told = await self.ask(node, "/health", "")
            state[node.role] = {fact: told[fact] for fact in _OF_NODES}
        return state

    async def set_right(self) -> None:
        """Undo what those with a key may do: drained nodes come back."""
        for node in self.nodes:
            await self.ask(node, "/undrain", "node", {})

    def ended(self) -> list[str]:
        """Find who has lost processes of those at the beginning, with the end of its log."""
        return [
            f"{each.role}: processes {gone} have ended (code {each.process.poll()}): "
            f"{self.news(each)[-1500:]}"
            for each in self.processes
            if (gone := sorted(self._born[each] - _alive(each)))
        ]

    def news(self, process: Node) -> str:
        with process.log.open("rb") as log:
            log.seek(self._read.get(process, 0))
            told = log.read()
            self._read[process] = log.tell()
        return told.decode(errors="replace")

    def ports(self) -> list[Port]:
        pids = [pid for process in self.processes for pid in family(process.process.pid)]
        return [port for port in listening(pids) if port.protocol == "tcp"]

    def usage(self) -> dict[str, Size]:
        return {each.name: size_of(*family(each.process.pid)) for each in self.processes}


def _alive(process: Node) -> set[int]:
    found = set()
    for pid in family(process.process.pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.add(pid)
    return found
