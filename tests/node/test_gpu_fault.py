"""A GPU that fails for good: requests end once, the process ends with one sentence, its supervisor
starts another.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest

from kvrelay.node.process import crash_report
from kvrelay.supervisor import Child, ChildSpec, Supervisor

sys.path.insert(0, str(Path(__file__).parent.parent / "cluster"))
from real_cluster import free_port, tiny_model

SAID = (
    "the GPU has failed in this process (CUDA error: {}); only a new process can use it again, "
    "so this one ends"
)
WHY, REAL = (
    SAID.format("an illegal memory access was encountered"),
    SAID.format("device-side assert triggered"),
)
DEADLINE_S = 120.0


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`",
        "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx",
    ],
)
def test_a_sticky_error_is_known_wherever_it_was_raised(message: str) -> None:
    try:
        try:
            raise RuntimeError(message)
        except RuntimeError as why:
            raise RuntimeError("a thread has ended") from why
    except RuntimeError as why:
        said = crash_report(why)
    assert said.startswith(f"the GPU has failed in this process ({message.partition(chr(10))[0]})")
    assert "\n" not in said


def test_other_errors_are_said_in_their_first_line() -> None:
    assert crash_report(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")).startswith(
        "CUDA out of memory"
    )
    assert crash_report(ValueError("one\ntwo")) == "one"
    assert crash_report(KeyError()) == "KeyError"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def healthy(spec: ChildSpec) -> bool:
    async with httpx2.AsyncClient() as http:
        try:
            return (await http.get(spec.health_url, timeout=60)).status_code == 200
        except httpx2.HTTPError:
            return False


class Watched:
    """A node under a supervisor, whose engine's GPU fails when it is told to."""

    def __init__(self, folder: Path, repository: Path, *more: str) -> None:
        port = free_port()
        self.url, self.said = f"http://127.0.0.1:{port}", list[str]()
        self.trigger, self.log = folder / "fault", folder / "node.log"
        fault = Path(__file__).with_name("gpu_fault")
        flags = [
            *tiny_model(folder),
            "--served-model-name",
            "tiny",
            "--kv-cache-memory-bytes",
            str(4 << 20),
            *more,
        ]
        paths = [str(fault), str(repository), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "GPU_FAULT": str(self.trigger),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self.spec = ChildSpec(
            "node",
            (sys.executable, "-m", "kvrelay.cli", "serve", "--port", str(port), *flags),
            f"{self.url}/health",
            self.log,
            environment,
        )
        self.supervisor = Supervisor(healthy, self.said.append)

    async def ask(
        self, begun: asyncio.Event, *, stream: bool, tokens: int = 900
    ) -> tuple[int, str]:
        """Return status and text of a long answer; set `begun` once it has some bytes."""
        body = {
            "model": "tiny",
            "prompt": [5] * 30,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        text = ""
        async with (
            httpx2.AsyncClient(timeout=DEADLINE_S) as http,
            http.stream("POST", f"{self.url}/v1/completions", json=body) as answer,
        ):
            async for part in answer.aiter_text():
                text += part
                begun.set()
            return answer.status_code, text


async def started(node: Watched, check: Callable[[Child], Awaitable[None]]) -> None:
    async with node.supervisor:
        child = node.supervisor.start(node.spec)
        await asyncio.wait_for(asyncio.shield(child.ready), DEADLINE_S)
        await check(child)


@pytest.mark.cluster
@pytest.mark.parametrize("fault", ["plane", "step stuck"])
async def test_a_gpu_that_fails_ends_every_request_once_and_the_node_is_started_again(
    tmp_path: Path, repository: Path, fault: str
) -> None:
    await gpu_fails(Watched(tmp_path, repository), fault, WHY)


@pytest.mark.cluster
@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["step real", "plane real"])
async def test_a_kernel_that_fails_ends_every_request_once(
    tmp_path: Path, repository: Path, fault: str
) -> None:
    node = Watched(tmp_path, repository, "--device", "cuda", "--gpu-memory-utilization", "0.2")
    config = tmp_path / "tiny" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"head_dim": 64, "torch_dtype": "bfloat16"})
    )
    await gpu_fails(node, fault, REAL)


async def gpu_fails(node: Watched, fault: str, why: str) -> None:
    async def check(child: Child) -> None:
        begun, whole = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            streamed = group.create_task(node.ask(begun, stream=True))
            waited = group.create_task(node.ask(whole, stream=False))
            await asyncio.wait_for(begun.wait(), DEADLINE_S)
            node.trigger.write_text(fault)
        assert not await healthy(node.spec)
        status, text = streamed.result()
        *_, error, done = (line for line in text.splitlines() if line)
        assert (status, done) == (200, "data: [DONE]")
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == why
        assert text.count('"error"') == 1
        status, text = waited.result()
        assert status == 503
        assert json.loads(text)["error"]["message"] == why
        await until(lambda: any("ready again" in line for line in node.said))
        assert any("node ended (exit code 1) after" in line for line in node.said)
        assert child.running
        status, text = await node.ask(asyncio.Event(), stream=False, tokens=20)
        assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 20)
        assert node.log.read_text().count(f"ERROR kvrelay.engine {why}") == 1

    await started(node, check)
