"""The routers that benchmarks/router.py compares: how each is installed and started over a prefill and a decode node.

Owns their processes for the time of a measurement. The peers come from PyPI, each into a virtual environment of its
own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.local_cluster import family, free_ports
from benchmarks.mock_nodes import MODEL

__all__ = ["OURS", "PEERS", "Running", "direct", "mock_node", "router"]

OURS = "kvrelay"
PEERS = ("vllm-router", "sglang-router")
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0


class Running(msgspec.Struct, frozen=True):
    """A process that answers, and its children."""

    url: str
    pids: list[int]


def _argv(name: str, venvs: Path, prefill: str, decode: str, port: int, flags: Sequence[str]) -> list[str]:
    if name.startswith(OURS):
        nodes = [f"--prefill={prefill}", f"--decode={decode}"]
        workers = f"--workers={name.partition(' x')[2] or 1}"
        return [sys.executable, "-m", "kvrelay.cli", "router", *nodes, f"--port={port}", workers, *flags]
    folder = venvs / name
    if not (folder / "bin" / "python").exists():
        print(f"installing {name} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", name], check=True, stdout=sys.stderr)
    ports = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_ports(1)[0])]
    nodes = ["--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--log-level", "error"]
    if name == "vllm-router":
        pairing = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        return [str(folder / "bin" / "vllm-router"), *pairing, *nodes, *ports]
    return [str(folder / "bin" / "python"), "-m", "sglang_router.launch_router", "--pd-disaggregation", *nodes, *ports]


@contextmanager
def mock_node(role: str, *flags: str) -> Iterator[Running]:
    """One mock node as a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.mock_nodes", role, *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        try:
            yield Running(f"http://127.0.0.1:{int(process.stdout.readline())}", [process.pid])
        finally:
            process.kill()


@contextmanager
def router(name: str, venvs: Path, prefill: str, decode: str, flags: Sequence[str] = ()) -> Iterator[Running]:
    """A router, as soon as it answers a chat completion. `flags` are for ours, whose name may end in ` xWORKERS`.

    Raises RuntimeError if it never does.
    """
    (port,) = free_ports(1)
    argv = _argv(name, venvs, prefill, decode, port, flags)
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "NO_PROXY": "*"}
        process = subprocess.Popen(
            argv, stdout=log, stderr=log, cwd=Path(__file__).parents[1], env=environment, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _answers(url, process, ours=name.startswith(OURS)):
                log.seek(0)
                raise RuntimeError(f"{name} did not answer: {log.read().decode(errors='replace')[-3000:]}")
            yield Running(url, family(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def direct(decode: str) -> Iterator[Running]:
    """No router at all: the decode node is asked."""
    yield Running(decode, [])


def _answers(url: str, process: subprocess.Popen[bytes], *, ours: bool) -> bool:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    wanted = urllib.request.Request(
        f"{url}/v1/chat/completions", msgspec.json.encode(body), {"content-type": "application/json"}
    )
    give_up = time.monotonic() + START_DEADLINE_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(wanted, timeout=5) as answer:
                if b"[DONE]" in answer.read() and (not ours or _all_listen(url)):
                    return True
        except OSError:
            time.sleep(0.2)
    return False


def _all_listen(url: str) -> bool:
    """Whether all workers of our router do."""
    with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        workers = msgspec.json.decode(answer.read()).get("workers", {})
    return bool(workers.get("listening") == workers.get("wanted"))
