"""Speed of the engine alone on a GPU, without HTTP: `python -m benchmarks.engine [row ...]`.

Llama-3.1-8B shape with random weights unless --model names another. Contexts of the decode rows are
not computed (paged_engine/timed_steps.py). Beside the rows of RESULTS.md it shows where the GPU's
time goes. `kvrelay profile` measures other steps, of any model and on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from kvrelay.node.ranks import join_as_rank_0
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.timed_steps import TimedSteps
from kvrelay.wire.config import EngineConfig

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b.json"
# Name of a row -> (requests at a time, tokens of context, aim in ms, vLLM 0.26 in ms)
DECODES = {
    "decode-1x1k": (1, 1024, 4.0, 4.86),
    "decode-32x1k": (32, 1024, 5.2, 6.21),
    "decode-128x1k": (128, 1024, 8.6, 10.37),
    "decode-32x4k": (32, 4096, 8.4, 9.03),
    "decode-256x384": (256, 384, 11.4, 11.82),  # the middle of the generate row
}
# Steps with a short prompt, alone or beside decodes: (requests that decode, tokens of their
# contexts, of the prompt)
MIXED = {
    "prompt-16": (0, 0, 16),
    "prompt-64": (0, 0, 64),
    "prompt-256": (0, 0, 256),
    "prompt-512": (0, 0, 512),
    "prompt-1k": (0, 0, 1024),
    "prompt-2k": (0, 0, 2048),
    "mixed-32x1k+64": (32, 1024, 64),
    "mixed-32x1k+256": (32, 1024, 256),
    "mixed-32x1k+512": (32, 1024, 512),
    "mixed-128x1k+64": (128, 1024, 64),
}
# Name of a row -> (tokens of a prompt, prompts, aim and vLLM 0.26 in tokens/s)
PREFILLS = {
    "prefill-4k": (4096, 32, "aim 47,000 tokens/s, vLLM 0.26 41,626"),
    "prefill-8k": (8192 - 64, 16, ""),
}
OTHERS = (*PREFILLS, "generate-128-512")


class Bench:
    """One engine, and what is measured on it."""

    def __init__(self, engine: Engine) -> None:
        self.timed = TimedSteps(engine)

    def decode(self, batch: int, context: int, steps: int = 100) -> dict[str, float]:
        """Median and 99th percentile of the time between two steps' tokens, and the share in which
        the GPU idles.
        """
        times = self.timed.times(batch, context, most=steps, seconds=math.inf)
        with self.timed.decoding(batch, context, steps=40):
            idle = idle_share(lambda: [self.timed.step() for _ in range(20)])
        return {**middle_and_tail(times), "idle": idle}

    def mixed(self, requests: int, context: int, tokens: int) -> dict[str, float]:
        """The same of steps with a prompt of so many tokens, beside so many decodes; without the
        share.
        """
        times = self.timed.times(requests, context, tokens, most=60, seconds=math.inf)
        return middle_and_tail(times)

    def prefill(self, prompt_tokens: int, prompts: int) -> dict[str, float]:
        self.timed.submit(prompt_tokens, 1)
        self.timed.drain()
        for _ in range(prompts):
            self.timed.submit(prompt_tokens, 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.timed.drain()
        return {"tokens_s": prompts * prompt_tokens / (time.perf_counter() - began)}

    def generate(
        self, prompt_tokens: int, max_tokens: int, at_a_time: int, total: int
    ) -> dict[str, float]:
        """Output tokens per second with a fixed number of requests at a time, their prefills among
        the decodes.
        """
        open_, left, tokens = 0, total, 0
        torch.cuda.synchronize()
        began = time.perf_counter()
        while left or open_:
            while left and open_ < at_a_time:
                self.timed.submit(prompt_tokens, max_tokens)
                left, open_ = left - 1, open_ + 1
            updated = self.timed.step()
            tokens += len(updated)
            open_ -= sum(request.finish is not None for request in updated)
        self.timed.drain()
        return {"tokens_s": tokens / (time.perf_counter() - began)}


def middle_and_tail(times: Sequence[float]) -> dict[str, float]:
    return {"ms": statistics.median(times), "p99_ms": sorted(times)[int(len(times) * 0.99)]}


def idle_share(work: Callable[[], object]) -> float:
    """Share of the time between the first and the last GPU activity of `work` in which nothing ran
    on the GPU.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profiled.events()
        if e.device_type.name == "CUDA"
    )
    if not spans:
        return float("nan")
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return float(1 - busy / (end - spans[0][0]))


def kernel_times(work: Callable[[], object], steps: int) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        torch.cuda.synchronize()
    rows = sorted(profiled.key_averages(), key=lambda e: -e.device_time_total)[:14]
    return "\n".join(
        f"    {e.device_time_total / steps:9.1f} us  {e.count / steps:6.1f} x  {e.key[:90]}"
        for e in rows
    )


def run(
    engine: Engine, rows: list[str], profile: bool
) -> Iterator[tuple[str, dict[str, float], str]]:
    bench = Bench(engine)
    timed = bench.timed
    for row in rows:
        if row in DECODES:
            batch, context, aim, theirs = DECODES[row]
            yield row, bench.decode(batch, context), f"aim {aim} ms, vLLM 0.26 {theirs} ms"
            if profile:
                with timed.decoding(batch, context, steps=40):
                    print(kernel_times(lambda: [timed.step() for _ in range(10)], 10))
        elif row in MIXED:
            yield row, bench.mixed(*MIXED[row]), "the next one launched behind it"
        elif row in PREFILLS:
            tokens, prompts, compare = PREFILLS[row]
            yield row, bench.prefill(tokens, prompts), compare
            if profile:
                for _ in range(4):
                    timed.submit(tokens, 1)
                print(kernel_times(timed.drain, 4))
        elif row == "generate-128-512":
            yield row, bench.generate(128, 512, 256, 768), "aim 22,500 tokens/s, vLLM 0.26 18,943"
            if profile:
                for _ in range(256):
                    timed.submit(128, 100)
                for _ in range(40):
                    timed.step()
                print("idle", idle_share(lambda: [timed.step() for _ in range(20)]))
                print(kernel_times(lambda: [timed.step() for _ in range(10)], 10))
                timed.drain()
        else:
            sys.exit(f"unknown row {row!r}; there are {', '.join((*DECODES, *MIXED, *OTHERS))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=[*DECODES, *MIXED, *OTHERS])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument(
        "--profile", action="store_true", help="also print where the GPU's time goes"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of EngineConfig"
    )
    arguments = parser.parse_args()
    options: dict[str, Any] = {}
    for item in arguments.set:
        field, _, value = item.partition("=")
        options[field] = (
            json.loads(value) if value[:1].isdigit() or value in ("true", "false") else value
        )
    began = time.perf_counter()
    defaults: dict[str, Any] = {"max_model_len": 8192, "enable_prefix_caching": False}
    config = EngineConfig(
        model=arguments.model, load_format=arguments.load_format, **(defaults | options)
    )
    engine = Engine(config, join_as_rank_0(config))
    took = time.perf_counter() - began
    print(
        f"ready after {took:.1f} s; {engine.pool.num_blocks} blocks of {engine.pool.block_size} "
        f"tokens"
    )
    gc.collect()
    gc.freeze()
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(
        str(about["repr"])[:100]
    )
    figures = {}
    for row, result, compare in run(engine, arguments.rows, arguments.profile):
        figures[row] = result
        print(
            f"{row:<18}"
            + "".join(f" {name} {value:10.3f}" for name, value in result.items())
            + f"   ({compare})",
            flush=True,
        )
    print(f"kernels compiled after the engine was ready: {compiled or 'none'}")
    engine.close()
    print(
        json.dumps({"device": torch.cuda.get_device_name(), "options": options, "figures": figures})
    )


if __name__ == "__main__":
    main()
