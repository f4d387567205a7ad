"""Aggregated against 1P1D on this machine's CPU, with the embedded model.

    python -m benchmarks.cpu_speed --rounds 3

Each round starts both afresh and runs the load twice, first with other prompts to warm up; prints every round and
the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

from benchmarks.load import Report, run_load
from benchmarks.local_cluster import running

ARMS = {"aggregated": ("serve",), "1P1D": ("up", "--prefill=1", "--decode=1")}
COLUMNS = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "failed")


def _measure(arm: str, args: argparse.Namespace) -> Report:
    command, *flags = ARMS[arm]
    with running(command, "--cpu", *flags, *args.flag) as url:
        # Warm up with the same load of other prompts: only the chat template is then in the prefix cache.
        load = {"requests": args.requests, "concurrency": args.concurrency, "max_tokens": args.max_tokens}
        asyncio.run(run_load(url, **load, offset=args.requests))
        report, outcomes = asyncio.run(run_load(url, **load))
    for outcome in outcomes:
        if outcome.error:
            print("failed:", outcome.error)
    return report


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
    reports: dict[str, list[Report]] = {arm: [] for arm in ARMS}
    print(f"{'':12}" + "".join(f"{name:>21}" for name in COLUMNS))
    for _ in range(args.rounds):
        for arm in ARMS:
            report = _measure(arm, args)
            reports[arm].append(report)
            print(f"{arm:12}" + "".join(f"{getattr(report, name):21.1f}" for name in COLUMNS), flush=True)
    for arm, rounds in reports.items():
        medians = [statistics.median(getattr(report, name) for report in rounds) for name in COLUMNS]
        print(f"{arm + ' med':12}" + "".join(f"{value:21.1f}" for value in medians))
    return 1 if any(report.failed for rounds in reports.values() for report in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
