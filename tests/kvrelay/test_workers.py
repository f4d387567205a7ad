"""`kvrelay router --workers 2` over fake nodes: two processes serve one port as one router does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from process_state import alive
from yarl import URL

from kvrelay import workers
from kvrelay.router.admission.keys import hash_of
from kvrelay.router.guard import OPERATED
from kvrelay.router.workers import parent as parent_module
from kvrelay.router.workers.parent import Parent
from kvrelay.router.workers.worker import shared_port
from kvrelay.supervisor import ChildFailed
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.versions import RELEASE
from tests.router.router_doubles import MODEL, FakeNode, decode, prefill

PATH = "/v1/chat/completions"
OPERATOR = "the admin key"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
BOB = {"authorization": "Bearer b"}


async def until(
    condition: Callable[[], Awaitable[bool]] | Callable[[], bool], within_s: float = 30.0
) -> None:
    async with asyncio.timeout(within_s):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.02)


@dataclass
class Router:
    """The parent process."""

    process: Process
    url: str
    http: dict[int, aiohttp.ClientSession] = field(default_factory=dict)
    """One connection to each worker, by its index."""

    def pids(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def dial(self) -> None:
        """Have a connection to both workers: the kernel chooses by the client's port."""
        async with asyncio.timeout(30):
            while self.http.keys() != {0, 1}:
                http = aiohttp.ClientSession(
                    self.url, connector=aiohttp.TCPConnector(limit=1), headers=BOB
                )
                async with http.get("/health") as answer:
                    index = (await answer.json())["workers"]["index"]
                if index in self.http:
                    await http.close()
                else:
                    self.http[index] = http

    async def hang_up(self) -> None:
        for http in self.http.values():
            await http.close()
        self.http.clear()

    async def json(
        self, worker: int, path: str, body: Any = None, method: str = "", **headers: str
    ) -> Any:
        method = method or ("GET" if body is None else "POST")
        if path.startswith(OPERATED):
            headers |= {"authorization": f"Bearer {OPERATOR}"}
        async with self.http[worker].request(method, path, json=body, headers=headers) as answer:
            return await answer.json()

    async def ask(self, worker: int, body: Any = None, path: str = PATH, **headers: str) -> int:
        async with self.http[worker].post(path, json=body or BODY, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def metric(self, worker: int, name: str) -> float:
        async with self.http[worker].get("/metrics") as answer:
            found = re.search(rf"^{re.escape(name)} (\S+)$", await answer.text(), re.M)
        return float(found[1]) if found else 0.0


def write(folder: Path, *nodes: FakeNode, **more: Any) -> Path:
    config = {
        "workers": 2,
        "port": 0,
        "admin_key": OPERATOR,
        "prefill": [node.url for node in nodes if node.role == "prefill"],
        "decode": [node.url for node in nodes if node.role == "decode"],
        "health_interval_s": 0.05,
        "keys": [
            {"name": "bob", "sha256": hash_of("b"), "admin": True},
        ],
    }
    file = folder / "router.json"
    file.write_text(json.dumps(config | more))
    return file


@asynccontextmanager
async def router(folder: Path, *nodes: FakeNode) -> AsyncIterator[Router]:
    file = write(folder, *nodes)
    command = (sys.executable, "-P", "-u", "-m", "kvrelay.cli", "router", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    url, said = "", b""
    async with asyncio.timeout(60):
        while not url:
            line = await process.stderr.readline()
            said += line
            assert line, said.decode()
            found = re.search(rb"2 workers serve (http://\S+)", line)
            url = found[1].decode() if found else ""
    reading = asyncio.create_task(process.stderr.read())
    running = Router(process, url)
    try:
        await running.dial()
        for worker in (0, 1):
            told = await running.json(worker, "/health")
            assert all(node["up"] for node in told["nodes"])
        yield running
    finally:
        await running.hang_up()
        if process.returncode is None:
            process.kill()
        await process.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def nodes(*each: FakeNode) -> AsyncIterator[None]:
    if not each:
        yield
        return
    async with each[0].running(), nodes(*each[1:]):
        yield


async def test_two_workers_are_one_router(tmp_path: Path) -> None:
    p, d = prefill(), decode()
    async with nodes(p, d), router(tmp_path, p, d) as r:
        # Metrics are of both, whoever is asked.
        assert [await r.ask(worker) for worker in (0, 1, 1)] == [200] * 3
        done = f'kvrelay_router_requests_total{{model_name="{MODEL}",path="/v1/chat/completions",status="200"}}'

        async def counted_by_both() -> bool:  # each worker tells once a second what it has counted
            return [await r.metric(worker, done) for worker in (0, 1)] == [3, 3]

        await until(counted_by_both)
        up = f'kvrelay_router_node_up{{model_name="{MODEL}",node="{d.url}",role="decode"}}'
        assert (await r.metric(0, up), await r.metric(0, "kvrelay_router_workers")) == (1, 2)

        # The parent is asked what operators ask, with the key that they have; bodies are limited.
        for method, path, body, status in (
            ("POST", "/admin/drain", b'{"url": "http://x"}', 404),
            ("POST", "/admin/drain", b"[" + b" " * (1 << 16), 413),
            ("DELETE", "/admin/nodes", b"", 405),
            ("GET", "/admin/x", b"", 404),
            ("GET", "/admin/../health", b"", 404),
            ("POST", "/admin/%2e%2e/v1/chat/completions", b"{}", 404),
            ("POST", "/v1/load_lora_adapter", b"{}", 400),
            # What wants no key is one page, and nothing is read of a body for it.
            ("POST", "/metrics", b"{}", 405),
            ("GET", "/metrics/../health", b"", 404),
            ("POST", "/metrics/../v1/chat/completions", b"{}", 404),
        ):
            key, keyless = OPERATOR if path.startswith("/admin") else "b", "/metrics" in path
            for given, expected in ((key, status), ("wrong", status if keyless else 401)):
                # Not over a connection that is known to reach a worker: it may be closed.
                async with (
                    aiohttp.ClientSession(headers={"authorization": f"Bearer {given}"}) as http,
                    http.request(method, URL(r.url + path, encoded=True), data=body) as answer,
                ):
                    assert answer.status == expected, (path, await answer.text())
        async with (
            aiohttp.ClientSession() as http,
            http.get(r.url + "/metrics", headers={"content-length": str(1 << 40)}) as answer,
        ):
            assert answer.status == 200

        # A conversation goes on with whichever worker.
        async with r.http[0].post("/v1/responses", json={"model": MODEL, "input": "hi"}) as answer:
            first = (await answer.json())["id"]
        again = {"model": MODEL, "input": "and?", "previous_response_id": first}
        assert [await r.ask(worker, again, "/v1/responses") for worker in (0, 1)] == [200, 200]
        lost = again | {"previous_response_id": "resp_x"}
        assert await r.ask(1, lost, "/v1/responses") == 404
        assert (await r.json(1, f"/v1/responses/{first}", method="DELETE"))["deleted"]
        assert await r.ask(0, again, "/v1/responses") == 404

        async def counted() -> float:
            return await r.metric(1, done)

        async def serve(alias: str) -> bool:
            return [await r.ask(worker, BODY | {"model": alias}) for worker in (0, 1)] == [200, 200]

        # A new configuration is taken over by both or by neither, whoever asks for it; and by those
        # that begin later.
        write(tmp_path, p, d, alias=[f"best={MODEL}"])
        assert await r.json(1, "/admin/reload", {}) == {"changed": ["alias"]}
        await until(partial(serve, "best"))
        write(tmp_path, p, d, keys=[])
        told = await r.json(0, "/admin/reload", {})
        assert told["error"]["message"].startswith("the new configuration has no API keys")
        write(tmp_path, p, d, alias=[f"better={MODEL}"])
        r.process.send_signal(signal.SIGHUP)
        await until(partial(serve, "better"))

        before = await counted()
        victim = r.pids()
        assert len(victim) == 2
        os.kill(victim[0], signal.SIGKILL)
        await r.hang_up()

        await until(lambda: len(r.pids()) == 2 and victim[0] not in r.pids())
        await r.dial()
        for worker in (0, 1):
            told = await r.json(worker, "/admin/nodes")
            assert {node["url"] for node in told["nodes"]} == {p.url, d.url}

        async def none_lost() -> bool:
            return await counted() >= before

        await until(none_lost)
        await until(partial(serve, "better"))
        assert await r.metric(0, "kvrelay_router_worker_restarts_total") == 1

        # SIGTERM leaves nothing behind.
        left = r.pids()
        await r.hang_up()
        r.process.terminate()
        assert await asyncio.wait_for(r.process.wait(), 30) == 0
        assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


async def test_a_new_worker_takes_requests_when_it_has_checked_the_nodes(tmp_path: Path) -> None:
    p, d = prefill(), decode()

    async def slowly(answer: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        await asyncio.sleep(0.3)
        return await answer(request)

    for node in (p, d):
        node.health = partial(slowly, node.health)  # type: ignore[method-assign]
    async with nodes(p, d), router(tmp_path, p, d) as r:
        await r.hang_up()
        first = r.pids()[0]
        os.kill(first, signal.SIGKILL)
        await until(lambda: first not in r.pids())
        await r.dial()
        assert [await r.ask(worker) for worker in (0, 1)] == [200, 200]


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is told by Linux")
async def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    p, d = prefill(), decode()
    async with nodes(p, d), router(tmp_path, p, d) as r:
        left = r.pids()
        r.process.kill()
        await r.process.wait()
        await until(lambda: not any(alive(pid) for pid in left))


async def test_a_worker_that_is_stopped_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parent_module, "HANGS_S", 5.0)
    began: list[Parent] = []
    monkeypatch.setattr(workers, "Parent", lambda *given: began.append(Parent(*given)) or began[0])
    with shared_port("127.0.0.1", 0) as held:
        running = asyncio.create_task(workers._run(RouterConfig(workers=1), held.getsockname()[1]))
        try:
            await until(lambda: bool(began) and began[0].serves_at(0))
            first = began[0]._peers[0]
            stopped = first.kill.__self__.process.pid  # type: ignore[attr-defined]
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: began[0].listening() == 0)
            await until(lambda: began[0].serves_at(0))
            assert began[0]._peers[0] is not first
            assert not alive(stopped)
            told = began[0].router.metrics.registry.get_sample_value
            for what in ("hung", "restarts"):
                assert told(f"kvrelay_router_worker_{what}_total") == 1
            assert "worker 0 hangs and is killed" in caplog.text
            assert "worker 0 was killed after" in caplog.text
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_worker_of_another_release_says_so_and_ends_the_router(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "RELEASE", "0.0.9")
    with shared_port("127.0.0.1", 0) as held:
        try:
            with pytest.raises(ChildFailed, match=r"exit code 2.* the lines above say why"):
                await workers._run(RouterConfig(workers=1), held.getsockname()[1])
            said = capfd.readouterr().err
            assert f"of kvrelay {RELEASE} and its parent of 0.0.9; restart the router" in said
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().remove_signal_handler(number)
