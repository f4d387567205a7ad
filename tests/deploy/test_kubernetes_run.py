"""cpu-demo runs: processes started as its manifests say, an API server double that knows them, and
a kubelet's part.

Each pod has an address of the loopback of its own. Not covered: images, volumes, policies, the
scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kubernetes_manifests import SECRETS, PodOf, arguments, pods

from tests.cluster.real_cluster import START_DEADLINE_S, tiny_model
from tests.router.kubernetes_double import ApiServer, pod_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
TOKENS = 400
POD = """
import os, pathlib, sys
from kvrelay.cli import main
from kvrelay.router.membership import kubernetes_pods
kubernetes_pods.ACCOUNT = pathlib.Path(os.environ["ACCOUNT"])
sys.exit(main())
"""
"""The command line, with a service account elsewhere."""


@dataclass
class Running:
    """A pod, and the process of its container."""

    pod: PodOf
    address: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def name(self) -> str:
        return str(self.pod.owner["metadata"]["name"])

    def url(self, path: str) -> str:
        return f"http://{self.address}:{self.pod.ports['http']}{path}"

    async def probe(self, http: aiohttp.ClientSession, name: str) -> bool:
        """What a kubelet would find."""
        probe = self.pod.main[f"{name}Probe"]
        try:
            async with http.get(
                self.url(probe["httpGet"]["path"]), timeout=aiohttp.ClientTimeout(10)
            ) as answer:
                return 200 <= answer.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    def told(self, *, ready: bool, terminating: bool = False) -> dict[str, Any]:
        """As an API server has it."""
        told = pod_of(self.name, self.url(""), "", ready=ready)
        told["metadata"]["labels"] = self.pod.labels
        told["spec"]["containers"] = self.pod.spec["containers"]
        if terminating:
            told["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
        return told


class Kubelet:
    """Starts pods and ends them."""

    def __init__(self, folder: Path, api: ApiServer, http: aiohttp.ClientSession) -> None:
        self.folder, self.api, self.http = folder, api, http
        self.running: dict[str, Running] = {}

    def environment(self, pod: PodOf, address: str) -> dict[str, str]:
        """Of its containers."""
        fields = {"status.podIP": address, "metadata.uid": f"uid-{pod.owner['metadata']['name']}"}
        found = {
            name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")
        }
        found |= {"PYTHONPATH": str(ROOT), "ACCOUNT": str(self.folder / "account")} | self.api.env
        for variable in pod.main["env"]:
            name, source = variable["name"], variable.get("valueFrom", {})
            field = source.get("fieldRef", {}).get("fieldPath")
            found[name] = variable.get("value") or (fields[field] if field else SECRETS[name])
        return found

    async def start(self, pod: PodOf, engine: str) -> Running:
        """A pod with another engine.yaml."""
        name, address = str(pod.owner["metadata"]["name"]), f"127.0.0.{31 + len(self.running)}"
        folder = self.folder / name
        folder.mkdir()
        args = [
            arg.replace("0.0.0.0", address) for arg in arguments("cpu-demo", pod, folder, address)
        ]
        if (folder / "engine.yaml").exists():
            (folder / "engine.yaml").write_text(engine)
        log = folder / "log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", POD, *args),
                stdout=out,
                stderr=out,
                env=self.environment(pod, address),
            )
        self.running[name] = running = Running(pod, address, process, log)
        return running

    async def run_hook(self, running: Running) -> int:
        """Its preStop hook, whose exit code this is."""
        _, *args = running.pod.main["lifecycle"]["preStop"]["exec"]["command"]
        args = [arg.replace("127.0.0.1", running.address) for arg in args]
        env = self.environment(running.pod, running.address)
        hook = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrelay.cli", *args, env=env
        )
        return await asyncio.wait_for(hook.wait(), 60)

    async def close(self) -> None:
        for running in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)
        for running in self.running.values():
            try:
                await asyncio.wait_for(running.process.wait(), 15)
            except TimeoutError:
                running.process.kill()
                await running.process.wait()


async def until(
    what: str, condition: Callable[[], Any], deadline_s: float = START_DEADLINE_S
) -> None:
    """Ask until it is so."""
    async with asyncio.timeout(deadline_s):
        while not await condition():
            await asyncio.sleep(0.05)


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    running = ApiServer("kvrelay").running(tmp_path / "account")
    async with running as api, aiohttp.ClientSession() as http:
        kubelet = Kubelet(tmp_path, api, http)
        try:
            yield kubelet
        finally:
            await kubelet.close()


async def test_pods_get_ready_are_found_serve_and_are_drained(
    kubelet: Kubelet, tmp_path: Path
) -> None:
    flags = dict(zip(*[iter(tiny_model(tmp_path))] * 2, strict=True))
    engine = "".join(
        f"{flag.removeprefix('--').replace('-', '_')}: {value}\n" for flag, value in flags.items()
    )
    for pod in pods("cpu-demo"):
        await kubelet.start(pod, engine)
    http, everyone = kubelet.http, list(kubelet.running.values())
    for running in everyone:
        await until(
            f"{running.name} answers", lambda running=running: running.probe(http, "liveness")
        )
    for running in (each for each in everyone if each.pod.component == "node"):
        await until(
            f"{running.name} has started", lambda running=running: running.probe(http, "startup")
        )
        assert await running.probe(http, "readiness")
        kubelet.api.put(running.told(ready=True))
    router, decode = kubelet.running["kvrelay-router"], kubelet.running["kvrelay-decode"]
    await until("the router has found them", lambda: router.probe(http, "readiness"))

    body = {
        "model": "tiny",
        "prompt": "x" * 200,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    key = {"authorization": f"Bearer {SECRETS['KVRELAY_API_KEY']}"}
    async with http.post(router.url("/v1/completions"), json=body, headers=key) as answer:
        assert answer.status == 200, await answer.text()
        assert await answer.content.readuntil(b"\n\n")
        kubelet.api.put(decode.told(ready=True, terminating=True))
        hook = asyncio.create_task(kubelet.run_hook(decode))
        rest = answer.content.read()

        async def drains() -> bool:
            return not await decode.probe(http, "readiness")

        await until("it drains", drains, 60)
        assert await decode.probe(http, "liveness"), "draining is no reason to be killed"
        text = (await rest).decode()
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert await hook == 0
    decode.process.send_signal(signal.SIGTERM)
    # uvicorn ends by the signal that it was ended with, after all is done; as process 1 of a
    # container it cannot.
    assert await asyncio.wait_for(decode.process.wait(), 30) in (0, -signal.SIGTERM), (
        decode.log.read_text()
    )
    kubelet.api.delete(decode.name)

    async def out() -> bool:
        return not await router.probe(http, "readiness")

    await until("the router knows that nobody decodes", out, 30)
    assert await router.probe(http, "liveness")
