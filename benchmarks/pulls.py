"""Decode steps beside pulls of cached KV, and times to a first token with and without them.

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.engine import MODEL
from benchmarks.local_cluster import running
from benchmarks.transfer import PINNED_S, TOKEN_BYTES, open_pair
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.timed_steps import TimedSteps
from kvrelay.wire.config import EngineConfig

TOKENS = 2048, 8192, 32768
BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
POOL_BYTES = 10 << 30
CHECKSUMS = 0.001
WRITE_BEHIND_BYTES_S, BATCH = 8e9, 32
# Tokens of a prompt that displaces others; and what was computed is in host memory by then.
FILLER, STORED_S = 39_000, 3.0


def row(name: str, values: Sequence[float]) -> None:
    print(f"{name:34}" + "".join(f"{value:10.2f}" for value in values), flush=True)


def steps(devices: list[str]) -> None:
    config = EngineConfig(str(MODEL), load_format="dummy", kv_cache_memory_bytes=POOL_BYTES)
    engine = Engine(config)
    timed, pool = TimedSteps(engine), engine.pool.bytes.view(-1)
    ours = engine.scheduler.pool.allocate(max(TOKENS) // BLOCK_TOKENS) or []

    def beside(name: str, work: Callable[[], None] | None = None) -> None:
        over = threading.Event()

        def loop() -> None:
            while work is not None and not over.is_set():
                work()

        thread = threading.Thread(target=loop)
        thread.start()
        times = sorted(timed.times(32, 1024, most=150, seconds=60.0))
        over.set()
        thread.join()
        figures = statistics.median(times), statistics.fmean(times), times[len(times) * 99 // 100]
        row(name, figures)

    for device in ["cpu", *devices[1:]]:
        ends = ("direct", [devices[0], device], POOL_BYTES // 2, BLOCK_BYTES, CHECKSUMS)
        with open_pair(*ends, pool) as stores:
            loads, theirs = stores.turned(), range(2, stores.num_blocks[1])

            def load() -> None:
                """Have the engine read the longest prompt, all zero."""
                loads.hand_over(random.sample(theirs, len(ours)), ours, 1, 0.0)  # noqa: B023

            def store() -> None:
                """Have the other process read a batch, in the time of write-behind."""
                until = time.monotonic() + BATCH * BLOCK_BYTES / WRITE_BEHIND_BYTES_S
                stores.hand_over(ours[:BATCH], random.sample(theirs, BATCH), 1, 0.0)  # noqa: B023
                time.sleep(max(0.0, until - time.monotonic()))

            load()
            time.sleep(PINNED_S)
            for _ in range(2):
                beside(f"alone, {device}")
                beside(f"loads from {device}", load)
                beside(f"stores to {device}", store)
    engine.close()


def first_token_ms(url: str, prompt: list[int], source: dict[str, Any]) -> float:
    named = {"sources": [source | {"tokens": len(prompt)}]}
    body = {"model": "8b", "prompt": prompt, "stream": True, "kv_transfer_params": named}
    began = time.perf_counter()
    with urlopen(f"{url}/v1/completions", json.dumps(body).encode(), 60) as answer:
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
        with urlopen(f"{first}/health", timeout=10) as answer:
            kv = json.load(answer)["kv"]
        source = {"host": kv["address"]} | {
            name: kv[name] for name in ("port", "generation", "seal")
        }

        def made(tokens: int) -> list[int]:
            return random.choices(range(3, 100_000), k=tokens)

        def measured(tokens: int) -> list[float]:
            prompt = made(tokens)
            found = [first_token_ms(url, prompt, source) for url in (first, first, other)]
            time.sleep(STORED_S)
            for _ in range(2):
                first_token_ms(first, made(FILLER), source)
            return [*found, first_token_ms(first, prompt, source)]

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
