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
    """A pod, the process of its container, and the environment that both it and its hook have."""

    pod: PodOf
    address: str
    env: dict[str, str]
    process: asyncio.subprocess.Process

    @property
    def name(self) -> str:
        return str(self.pod.owner["metadata"]["name"])

    def url(self, path: str) -> str:
        return f"http://{self.address}:{self.pod.ports['http']}{path}"

    async def probe(self, http: aiohttp.ClientSession, name: str) -> bool:
        """What a kubelet would find."""
        probe = self.pod.main[f"{name}Probe"]
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.get(
                self.url(probe["httpGet"]["path"]), timeout=aiohttp.ClientTimeout(10)
            ) as answer:
                return answer.status < 400
        return False

    async def run_hook(self) -> int:
        """Run the preStop hook; return its exit code."""
        _, *args = self.pod.main["lifecycle"]["preStop"]["exec"]["command"]
        args = [arg.replace("127.0.0.1", self.address) for arg in args]
        hook = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrelay.cli", *args, env=self.env
        )
        return await asyncio.wait_for(hook.wait(), 60)

    def told(self, *, terminating: bool = False) -> dict[str, Any]:
        """Return the pod as an API server has it, once it is ready."""
        told = pod_of(self.name, self.url(""), "", ready=True)
        told["metadata"]["labels"] = self.pod.labels
        told["spec"]["containers"] = self.pod.spec["containers"]
        if terminating:
            told["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
        return told


@contextlib.asynccontextmanager
async def running(
    pod: PodOf, address: str, folder: Path, env: dict[str, str], engine: str
) -> AsyncIterator[Running]:
    """Start a pod with another engine.yaml; it ends with the block."""
    folder.mkdir()
    args = [arg.replace("0.0.0.0", address) for arg in arguments("cpu-demo", pod, folder, address)]
    if (folder / "engine.yaml").exists():
        (folder / "engine.yaml").write_text(engine)
    fields = {"status.podIP": address, "metadata.uid": f"uid-{folder.name}"}
    for variable in pod.main["env"]:
        name, source = variable["name"], variable.get("valueFrom", {})
        field = source.get("fieldRef", {}).get("fieldPath")
        env[name] = variable.get("value") or (fields[field] if field else SECRETS[name])
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", POD, *args, env=env)
    try:
        yield Running(pod, address, env, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 15)
        except TimeoutError:
            process.kill()
            await process.wait()


async def until(condition: Callable[[], Any], deadline_s: float = START_DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_pods_get_ready_are_found_serve_and_are_drained(tmp_path: Path) -> None:
    words = [word for flag in tiny_model(tmp_path) for word in flag.split("=", 1)]
    engine = "".join(
        f"{flag.removeprefix('--').replace('-', '_')}: {value}\n"
        for flag, value in zip(words[::2], words[1::2], strict=True)
    )
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    ours |= {"PYTHONPATH": str(ROOT), "ACCOUNT": str(tmp_path / "account")}
    async with contextlib.AsyncExitStack() as ends:
        api = await ends.enter_async_context(ApiServer("kvrelay").running(tmp_path / "account"))
        http = await ends.enter_async_context(aiohttp.ClientSession())
        found: dict[str, Running] = {}
        for at, pod in enumerate(pods("cpu-demo"), 31):
            name = str(pod.owner["metadata"]["name"])
            run = running(pod, f"127.0.0.{at}", tmp_path / name, ours | api.env, engine)
            found[name] = await ends.enter_async_context(run)
        for each in found.values():
            await until(lambda each=each: each.probe(http, "liveness"))
            if each.pod.component == "node":
                await until(lambda each=each: each.probe(http, "startup"))
                assert await each.probe(http, "readiness")
                api.put(each.told())
        router, decode = found["kvrelay-router"], found["kvrelay-decode"]
        await until(lambda: router.probe(http, "readiness"))

        body = {"model": "tiny", "prompt": "x" * 200, "stream": True}
        body |= {"max_tokens": TOKENS, "ignore_eos": True}
        key = {"authorization": f"Bearer {SECRETS['KVRELAY_API_KEY']}"}
        async with http.post(router.url("/v1/completions"), json=body, headers=key) as answer:
            assert answer.status == 200, await answer.text()
            assert await answer.content.readuntil(b"\n\n")
            api.put(decode.told(terminating=True))
            hook = asyncio.create_task(decode.run_hook())

            async def drains() -> bool:
                return not await decode.probe(http, "readiness")

            await until(drains, 60)
            assert await decode.probe(http, "liveness"), "draining is no reason to be killed"
            text = (await answer.content.read()).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text
        assert await hook == 0
        decode.process.send_signal(signal.SIGTERM)
        # uvicorn ends by the signal that it was ended with, after all is done; as process 1 of a
        # container it cannot.
        assert await asyncio.wait_for(decode.process.wait(), 30) in (0, -signal.SIGTERM)
