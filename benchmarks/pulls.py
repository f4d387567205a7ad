"""What pulls of cached KV do to decode steps, and to the time to a first token.

    python -m benchmarks.pulls [steps] [nodes] [--devices cuda:0,cuda:1]

Llama-3.1-8B's shape in bf16 with random weights; milliseconds. `steps`: of 32 requests with 1k
context, alone and while an engine reads prompts of 32k, or is read from: median, mean, 99th
percentile. `nodes`: first tokens of prompts of 2k, 8k and 32k, as two nodes serve them to a client,
the best of two.
How long a pull itself takes, beside a plain copy, is in `benchmarks.transfer`:

    python -m benchmarks.transfer --connectors plain,direct,nixl --devices cpu,cuda:0 \\
        --sizes 256,1024,4096 --block-bytes 8388608 --checksums 0.001
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import MODEL
from benchmarks.local_cluster import running
from benchmarks.transfer import FETCH_S, PINNED_S, START_S, TOKEN_BYTES, End, heard, serve
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.timed_steps import TimedSteps
from kvrelay.wire.config import EngineConfig

TOKENS = 2048, 8192, 32768
BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
POOL_BYTES = 10 << 30
SETTINGS = "direct", POOL_BYTES // 2, BLOCK_BYTES, 0.001
WRITE_BEHIND_BYTES_S, BATCH = 2e9, 8
# Tokens of a prompt that displaces others; and what was computed is in host memory by then.
FILLER, STORED_S = 39_000, 3.0


def row(name: str, values: Sequence[float]) -> None:
    print(f"{name:34}" + "".join(f"{value:10.2f}" for value in values), flush=True)


class Beside:
    """An engine and another process that read from each other, and steps beside that."""

    def __init__(self, timed: TimedSteps, here: str, there: str, pipe: Connection) -> None:
        pool = timed.engine.pool.bytes.view(-1)
        self.end = End("engine", here, *SETTINGS, pool)
        self._timed, self._name, self._pipe = timed, there, pipe
        self._theirs, self._count = range(1, heard(pipe, START_S)), 0
        # All zero after the first load, as the other process's.
        self.ours = timed.engine.scheduler.pool.allocate(max(TOKENS) // BLOCK_TOKENS) or []

    def row(self, name: str, work: Callable[[], None] | None = None) -> None:
        over, before = threading.Event(), self._count

        def loop() -> None:
            while work is not None and not over.is_set():
                work()

        thread = threading.Thread(target=loop)
        thread.start()
        times = sorted(self._timed.decode(32, 1024, steps=150, seconds=60.0))
        over.set()
        thread.join()
        figures = statistics.median(times), statistics.fmean(times), times[len(times) * 99 // 100]
        row(f"{name} {self._count - before}, {self._name}", figures)

    def load(self) -> None:
        """Have the engine read the longest prompt."""
        name, theirs, ours = self._next(len(self.ours))
        self.end.take(name, self._ask("offer", name, theirs, False), ours, FETCH_S)
        self._ask("released")

    def store(self) -> None:
        """Have the other process read a batch, in the time of write-behind."""
        until = time.monotonic() + BATCH * BLOCK_BYTES / WRITE_BEHIND_BYTES_S
        name, theirs, ours = self._next(BATCH)
        self._ask("take", name, self.end.offer(name, ours, False), theirs, FETCH_S)
        self.end.released()
        time.sleep(max(0.0, until - time.monotonic()))

    def _next(self, count: int) -> tuple[str, list[int], list[int]]:
        self._count += 1
        theirs, ours = (random.sample(blocks, count) for blocks in (self._theirs, self.ours))
        return f"read-{self._count}", theirs, ours

    def _ask(self, *call: Any) -> Any:
        self._pipe.send(call)
        return heard(self._pipe, FETCH_S)


def steps(devices: list[str]) -> None:
    config = EngineConfig(str(MODEL), load_format="dummy", kv_cache_memory_bytes=POOL_BYTES)
    engine = Engine(config)
    timed = TimedSteps(engine)
    for device in ["cpu", *devices[1:]]:
        ours, its = get_context("spawn").Pipe()
        arguments = (its, device == "cpu", "peer", device, *SETTINGS)
        peer = get_context("spawn").Process(target=serve, args=arguments)
        peer.start()
        beside = Beside(timed, devices[0], device, ours)
        free = torch.cuda.mem_get_info()[0]
        beside.load()
        beside.store()
        took = (free - torch.cuda.mem_get_info()[0]) / 1e6
        print(f"the process of {device} takes {took:.0f} MB of the engine's GPU")
        beside.row("while it pins")
        time.sleep(PINNED_S)
        for _ in range(2):
            beside.row("alone")
            beside.row("loads", beside.load)
            beside.row("stores", beside.store)
        ours.close()
        peer.join(FETCH_S)
        beside.end.connector.close()
        engine.scheduler.pool.release(beside.ours)
    engine.close()


def first_token_ms(url: str, prompt: list[int], sources: Sequence[dict[str, Any]] = ()) -> float:
    body = {"model": "8b", "prompt": prompt, "max_tokens": 2, "stream": True}
    named = [{**source, "tokens": len(prompt)} for source in sources]
    content = json.dumps(body | {"kv_transfer_params": {"sources": named}}).encode()
    asked = urllib.request.Request(
        f"{url}/v1/completions", content, {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.readline()
        took_ms = (time.perf_counter() - began) * 1e3
        answer.read()
    return took_ms


def nodes(devices: list[str]) -> None:
    """Time first tokens of two nodes whose pools have room for 45k tokens."""
    flags = "--load-format dummy --served-model-name 8b --max-model-len 40k --kv-pull always"
    flags += " --kv-cache-memory-bytes 6GiB --kv-checksums 0.001 --kv-write-behind-bytes-s 20e9"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(MODEL.read_text())
        urls = list[str]()
        for device in devices[:2]:
            os.environ["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
            tier = [] if urls else ["--kv-host-memory", "24GiB"]
            of = ["--model", str(folder), *flags.split(), *tier]
            urls.append(stack.enter_context(running("serve", *of))[0])
        first, other = urls
        with urllib.request.urlopen(f"{first}/health", timeout=10) as answer:
            kv = json.load(answer)["kv"]
        source = {"host": kv["address"]} | {
            name: kv[name] for name in ("port", "generation", "seal")
        }

        def made(tokens: int) -> list[int]:
            return random.choices(range(3, 100_000), k=tokens)

        def measured(tokens: int) -> list[float]:
            prompt = made(tokens)
            computed, again = (first_token_ms(first, prompt) for _ in range(2))
            pulled = first_token_ms(other, prompt, [source])
            time.sleep(STORED_S)
            for _ in range(2):
                first_token_ms(first, made(FILLER))
            return [computed, again, pulled, first_token_ms(first, prompt)]

        measured(BLOCK_TOKENS * 2)
        names = "computed", "from its own GPU", "from the other GPU", "from host memory"
        found = [[measured(tokens) for _ in range(2)] for tokens in TOKENS]
        for at, name in enumerate(names):
            row(name, [min(run[at] for run in runs) for runs in found])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"steps": steps, "nodes": nodes}
    parser.add_argument("parts", nargs="*", default=[*parts])
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    asked = parser.parse_args()
    for part in asked.parts:
        parts[part](asked.devices.split(","))


if __name__ == "__main__":
    main()
