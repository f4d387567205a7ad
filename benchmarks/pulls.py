"""What pulls of cached KV take, beside plain copies, computing, and decode steps.

    python -m benchmarks.pulls [links] [steps] [nodes] [--devices cuda:0,cuda:1]

Llama-3.1-8B's shape in bf16 with random weights, prompts of 2k, 8k and 32k tokens. `links`: milliseconds between
two processes, as in benchmarks.transfer, and of cudaMemcpyAsync of as many bytes in one piece.
`steps`: decode steps of an engine alone, and while it is source or reader. `nodes`: the time to
a first token of two nodes, of which the other one, or host memory, has the prompt's KV.
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
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import MODEL
from benchmarks.local_cluster import running
from benchmarks.transfer import (
    FETCH_S,
    START_S,
    TOKEN_BYTES,
    End,
    heard,
    open_pair,
    serve,
    times_of,
)
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.timed_steps import TimedSteps
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import KvrelayError

TOKENS = 2048, 8192, 32768
BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
POOL_BYTES = 5 << 30
CHECKSUMS = 0.001
# A few GiB of host memory are pinned by then.
PINNED_S = 4.0
WRITE_BEHIND_BYTES_S, BATCH = 2e9, 8


def row(name: str, values: list[float], unit: str = "ms") -> None:
    print(f"{name:34}" + "".join(f"{value:10.2f}" for value in values) + f"  {unit}", flush=True)


def plain_ms(there: str, here: str, num_bytes: int) -> float:
    """Return the median time of one cudaMemcpyAsync."""
    source, target = (
        torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=device == "cpu")
        for device in (there, here)
    )
    times = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        for device in {there, here} - {"cpu"}:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[2:])


def links(devices: list[str]) -> None:
    ours, *others = devices
    ways = [("cpu", ours), (ours, "cpu"), *((other, ours) for other in others)]
    for there, here in ways:
        way = f"{there} to {here}"
        row(f"{way}, plain copy", [plain_ms(there, here, n * TOKEN_BYTES) for n in TOKENS])
        torch.cuda.empty_cache()
        for kind in ("direct", "nixl"):
            try:
                ends = (kind, [there, here], POOL_BYTES, BLOCK_BYTES, CHECKSUMS)
                with open_pair(*ends, keeps=True) as pair:
                    pair.hand_over([1], [1], 1, 0.0)
                    time.sleep(PINNED_S)
                    medians = [
                        statistics.median(times_of(pair, n // BLOCK_TOKENS, 1, 0.0, checked=False))
                        for n in TOKENS
                    ]
                row(f"{way}, {kind}", [each * 1e3 for each in medians])
            except KvrelayError as why:
                print(f"{way}, {kind}: {why.message}", flush=True)


def summary(times: list[float]) -> list[float]:
    return [
        statistics.median(times),
        statistics.fmean(times),
        sorted(times)[len(times) * 99 // 100],
    ]


class Beside:
    """An engine and another process that read from each other, and steps beside that."""

    def __init__(self, timed: TimedSteps, here: str, there: str, pipe: Connection) -> None:
        pool = timed.engine.pool.bytes.view(-1)
        self.end = End("engine", here, "direct", 0, BLOCK_BYTES, CHECKSUMS, pool)
        self._timed, self._name, self._pipe, self._rng = timed, there, pipe, random.Random(0)
        self._theirs, self._count = range(1, heard(pipe, START_S)), 0
        # All zero after the first load, as the other process's.
        self._ours = timed.engine.scheduler.pool.allocate(max(TOKENS) // BLOCK_TOKENS) or []

    def row(self, name: str, work: Callable[[], None] | None = None) -> None:
        """Print the times of steps, median, mean and 99th percentile, with work beside them."""
        over, before = threading.Event(), self._count

        def loop() -> None:
            while work is not None and not over.is_set():
                work()

        thread = threading.Thread(target=loop)
        thread.start()
        times = self._timed.decode(32, 1024, steps=150, seconds=60.0)
        over.set()
        thread.join()
        done = self._count - before
        row(f"step {name}, {self._name}, {done} done", summary(times))

    def load(self) -> None:
        """Have the engine read the longest prompt."""
        name, theirs, ours = self._next(len(self._ours))
        ticket = self._ask("offer", name, theirs, False)
        self.end.take(name, ticket, ours, FETCH_S)
        self._ask("released")

    def store(self) -> None:
        """Have the other process read a batch, in the time of write-behind."""
        until = time.monotonic() + BATCH * BLOCK_BYTES / WRITE_BEHIND_BYTES_S
        name, theirs, ours = self._next(BATCH)
        ticket = self.end.offer(name, ours, False)
        self._ask("take", name, ticket, theirs, FETCH_S)
        self.end.released()
        time.sleep(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        self.end.connector.close()
        self._timed.engine.scheduler.pool.release(self._ours)

    def _next(self, count: int) -> tuple[str, list[int], list[int]]:
        self._count += 1
        theirs, ours = (self._rng.sample(blocks, count) for blocks in (self._theirs, self._ours))
        return f"read-{self._count}", theirs, ours

    def _ask(self, *call: Any) -> Any:
        self._pipe.send(call)
        return heard(self._pipe, FETCH_S)


def steps(devices: list[str]) -> None:
    config = EngineConfig(
        model=str(MODEL),
        load_format="dummy",
        kv_cache_memory_bytes=2 * POOL_BYTES,
        max_model_len=max(TOKENS) + BLOCK_TOKENS,
        enable_prefix_caching=False,
    )
    engine = Engine(config)
    timed = TimedSteps(engine)
    computed = []
    for tokens in TOKENS:
        times = []
        for _ in range(4):
            began = time.perf_counter()
            timed.submit(tokens, 1)
            timed.drain()
            times.append((time.perf_counter() - began) * 1e3)
        computed.append(statistics.median(times[1:]))
    row("computed", computed)
    for device in ["cpu", *devices[1:]]:
        ours, its = get_context("spawn").Pipe()
        keeps, rest = device == "cpu", ("direct", POOL_BYTES, BLOCK_BYTES, CHECKSUMS)
        peer = get_context("spawn").Process(target=serve, args=(its, keeps, "peer", device, *rest))
        peer.start()
        beside = Beside(timed, devices[0], device, ours)
        free = torch.cuda.mem_get_info()[0]
        beside.load()
        beside.store()
        print(f"the other process takes {(free - torch.cuda.mem_get_info()[0]) / 1e6:.0f} MB")
        beside.row("while it pins")
        time.sleep(PINNED_S)
        for _ in range(2):
            beside.row("alone")
            beside.row("beside loads", beside.load)
            beside.row("beside stores", beside.store)
        ours.close()
        peer.join(FETCH_S)
        beside.close()
    engine.close()


def first_token_ms(url: str, prompt: list[int], source: dict[str, Any] | None = None) -> float:
    body = {"model": "8b", "prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0}
    if source is not None:
        body["kv_transfer_params"] = {"sources": [{**source, "tokens": len(prompt)}]}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    asked.add_header("content-type", "application/json")
    began = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.readline()
        took = (time.perf_counter() - began) * 1e3
        answer.read()
    return took


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines()]
    return sum(float(line[-1]) for line in lines if line and line[0].partition("{")[0] == name)


def nodes(devices: list[str]) -> None:
    """Time first tokens of nodes whose pool has room for 45k tokens."""
    rng, times = random.Random(0), dict[str, list[float]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(MODEL.read_text())
        flags = f"--model {folder} --load-format dummy --served-model-name 8b --max-model-len 40000"
        flags += " --kv-cache-memory-bytes 6GiB --kv-checksums 0.001 --kv-pull always"
        urls = list[str]()
        for device in devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
            tier = [] if urls else ["--kv-host-memory", "24GiB"]
            urls.append(stack.enter_context(running("serve", *flags.split(), *tier))[0])
        first = urls[0]
        with urllib.request.urlopen(f"{first}/health", timeout=10) as answer:
            kv = json.load(answer)["kv"]
        source = {"host": kv["address"], **{key: kv[key] for key in ("port", "generation", "seal")}}
        for tokens in (128, *TOKENS):
            for _ in range(3):
                prompt, filler = (
                    [rng.randrange(3, 100_000) for _ in range(n)] for n in (tokens, 39_000)
                )
                got = {
                    "computed": first_token_ms(first, prompt),
                    "own GPU": first_token_ms(first, prompt),
                }
                for url in urls[1:]:
                    got["other GPU"] = first_token_ms(url, prompt, source)
                until = time.monotonic() + 10
                stored, wanted = "kvrelay_tier_host_stored_blocks_total", tokens // BLOCK_TOKENS - 1
                while metric(first, stored) < wanted and time.monotonic() < until:
                    time.sleep(0.1)
                time.sleep(tokens * TOKEN_BYTES / WRITE_BEHIND_BYTES_S)
                for part in (filler[:20_000], filler[19_000:], filler):
                    first_token_ms(first, part)
                got["host memory"] = first_token_ms(first, prompt)
                for name, took in got.items():
                    times.setdefault(f"{tokens} {name}", []).append(took)
        for name in ("computed", "own GPU", "other GPU", "host memory"):
            row(f"first token, {name}", [statistics.median(times[f"{n} {name}"]) for n in TOKENS])
        for url in urls:
            print(
                f"{url} pulled {metric(url, 'kvrelay_pulled_tokens_total'):.0f} tokens, failed "
                f"{metric(url, 'kvrelay_pulls_failed_total'):.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"links": links, "steps": steps, "nodes": nodes}
    parser.add_argument("parts", nargs="*", default=[*parts], help=", ".join(parts))
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    asked = parser.parse_args()
    row("tokens", [float(tokens) for tokens in TOKENS], "")
    for part in asked.parts:
        began = time.monotonic()
        parts[part](asked.devices.split(","))
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
