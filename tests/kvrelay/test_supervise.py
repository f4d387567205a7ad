"""`kvrelay supervise`: a command that fails is started again, later each time; one that ends is not."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from process_state import alive

from kvrelay import cli, supervise
from kvrelay.supervisor import Backoff
from node.process_log import LOG_FORMAT

sys.path.insert(0, str(Path(__file__).parent.parent / "cluster"))
from real_cluster import free_port, tiny_model, wait_until

# A stand-in for a node: its exit codes in turn stand in a file; with none left it serves until it is told to end.
_STAND_IN = """
import pathlib, signal, sys, time
log, codes = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
with log.open("a") as file:
    file.write(f"{time.monotonic()}\\n")
left = codes.read_text().split()
if left:
    codes.write_text(" ".join(left[1:]))
    sys.exit(int(left[0]))
def end(number, frame):
    with log.open("a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number != signal.SIGHUP:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, end)
with log.open("a") as file:
    file.write("serves\\n")
while True:
    time.sleep(60)
"""


class StandIn:
    def __init__(self, folder: Path, *codes: int) -> None:
        self.log, self.codes = folder / "log", folder / "codes"
        self.log.touch()
        self.codes.write_text(" ".join(map(str, codes)))

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    async def keep(self, backoff: Backoff) -> int:
        words = [sys.executable, "-c", _STAND_IN, str(self.log), str(self.codes)]
        return await asyncio.wait_for(supervise._keep(words, "decode", backoff), 60)


async def until_it_serves(node: StandIn) -> None:
    async with asyncio.timeout(30):
        while "serves" not in node.lines():
            await asyncio.sleep(0.02)


async def test_it_starts_again_and_waits_longer_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = StandIn(tmp_path, 1, 1, 2, 0)  # 2 after it has worked once is a failure like any other
    assert await node.keep(Backoff(first_s=0.05)) == 0
    starts = [float(line) for line in node.lines()]
    assert len(starts) == 4
    waits = [after - before for before, after in itertools.pairwise(starts)]
    assert all(wait > least for wait, least in zip(waits, (0.05, 0.1, 0.2), strict=True))
    assert [line.rsplit("; ")[1] for line in caplog.messages] == [
        f"starting it again in {delay} s" for delay in ("0.05", "0.1", "0.2")
    ]
    assert caplog.messages[0].startswith("decode ended (exit code 1) after")


async def test_what_was_typed_wrongly_is_not_tried_again(tmp_path: Path) -> None:
    node = StandIn(tmp_path, 2, 0)
    assert await node.keep(Backoff()) == 2
    assert len(node.lines()) == 1


async def test_signals_go_to_the_child_and_one_that_waits_ends_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = StandIn(tmp_path)
    keeping = asyncio.create_task(node.keep(Backoff()))
    await until_it_serves(node)
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(30):
        while "SIGHUP" not in node.lines():
            await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await keeping == 0
    assert node.lines()[-1] == "SIGTERM"
    failing = StandIn(tmp_path, 1)
    keeping = asyncio.create_task(failing.keep(Backoff(first_s=600)))
    async with asyncio.timeout(30):
        while "starting it again in 600 s" not in caplog.text:
            await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
    assert await keeping == 0


async def test_a_signal_that_comes_while_a_child_is_started_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, begin = StandIn(tmp_path), asyncio.create_subprocess_exec

    async def begun(*command: str, **how: Any) -> asyncio.subprocess.Process:
        os.kill(os.getpid(), signal.SIGTERM)
        child = await begin(*command, **how)
        await until_it_serves(node)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begun)
    assert await node.keep(Backoff()) == 0
    assert node.lines()[-1] == "SIGTERM"


@pytest.mark.parametrize("words", [["supervise", "chat"], ["supervise", "up"], ["supervise", "--port", "1"]])
def test_only_what_serves_is_kept_running(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    assert "supervise keeps prefill, decode, serve, rank, router running" in capsys.readouterr().err


@pytest.mark.cluster
def test_a_node_whose_gpu_has_failed_is_another_process_and_serves_again(tmp_path: Path, repository: Path) -> None:
    port, trigger = free_port(), tmp_path / "fault"
    paths = [str(repository / "tests" / "node" / "gpu_fault"), str(repository), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "GPU_FAULT": str(trigger), "PYTHONPATH": os.pathsep.join(paths), LOG_FORMAT: "json"}
    flags = [*tiny_model(tmp_path), "--port", str(port), "--kv-cache-memory-bytes", str(4 << 20)]
    command = [sys.executable, "-m", "kvrelay.cli", "supervise", "serve", *flags]
    log = tmp_path / "log"
    with log.open("wb") as out:
        kept = subprocess.Popen(command, env=env, stdout=out, stderr=out)

    def generation() -> str:
        try:
            answer = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5)
        except httpx2.HTTPError:
            return ""
        return json.loads(answer.content)["generation"] if answer.status_code == 200 else ""

    try:
        first = wait_until(generation, 120, "the node is ready")
        trigger.write_text("step")
        body = {"model": "tiny", "prompt": [5] * 9, "max_tokens": 4}
        assert httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 503
        wait_until(lambda: generation() not in ("", first), 120, "another process serves")
        said = log.read_text()
        assert "the GPU has failed in this process" in said
        ours = [json.loads(line) for line in said.splitlines() if '"process": "supervise"' in line]
        assert [each["message"].partition(" after")[0] for each in ours] == ["serve ended (exit code 1)"]
        (pid,) = map(int, Path(f"/proc/{kept.pid}/task/{kept.pid}/children").read_text().split())
        kept.terminate()
        assert kept.wait(60) == 0
        assert not alive(pid)
    finally:
        kept.kill()
        kept.wait(10)
