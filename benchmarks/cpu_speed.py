"""Aggregated against 1P1D on this machine's CPU, with the embedded model.

    python -m benchmarks.cpu_speed --rounds 3

Each round starts both afresh and runs the load twice, first with other prompts to warm up: chat requests of about 55
prompt tokens, greedy, from one process of the client. Prints every round and the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

from benchmarks.local_cluster import running
from load.config import BenchConfig
from load.experiment import Experiment
from load.measures import Measures

ARMS = {"aggregated": ("serve",), "1P1D": ("up", "--prefill=1", "--decode=1")}
COLUMNS = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "failed")
PROMPT_TOKENS = 55


def _measure(arm: str, args: argparse.Namespace) -> list[float]:
    command, *flags = ARMS[arm]
    with running(command, "--cpu", *flags, *args.flag) as url:
        # Warm up with the same load of other prompts: only the chat template is then in the prefix cache.
        _load(url, args, seed=1)
        found = _load(url, args, seed=0)
    for example in found.examples:
        print("failed:", example)
    latency = [found.ttft_ms.p50, found.ttft_ms.p99, found.tpot_ms.p50, found.itl_ms.p99]
    return [found.output_tokens_per_s, *latency, float(sum(found.failures.values()))]


def _load(url: str, args: argparse.Namespace, seed: int) -> Measures:
    config = BenchConfig(
        url=url,
        endpoint="chat",
        lengths=f"{PROMPT_TOKENS}:{args.max_tokens}",
        concurrency=args.concurrency,
        requests=args.requests,
        warm_up_s=0.0,
        processes=1,
        seed=seed,
    )
    experiment = Experiment(config)
    asyncio.run(experiment.run())
    return experiment.runs[0].measures


def main() -> int:
    """Command line. Exit code 1 if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--flag", action="append", default=[], help="a flag for kvrelay, for example --flag=--threads=2"
    )
    args = parser.parse_args()
    rows: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    print(f"{'':12}" + "".join(f"{name:>21}" for name in COLUMNS))
    for _ in range(args.rounds):
        for arm in ARMS:
            rows[arm].append(_measure(arm, args))
            print(f"{arm:12}" + "".join(f"{value:21.1f}" for value in rows[arm][-1]), flush=True)
    for arm, rounds in rows.items():
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print(f"{arm + ' med':12}" + "".join(f"{value:21.1f}" for value in medians))
    return 1 if any(values[-1] for rounds in rows.values() for values in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
