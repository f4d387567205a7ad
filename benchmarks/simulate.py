"""How well the router places, on a virtual clock: the real placement, policies and prefix index,
simulated nodes.

python -m benchmarks.simulate [--trace mooncake_conversation.jsonl.gz]
python -m benchmarks.simulate --scale

The first compares the price and all policies on made-up workloads and, if given, on a trace in the
format that Mooncake has published (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0). The
second serves 100,000 streams on 1,000 nodes with reports of load that are up to 2 s old, by one
router and by eight that share nothing. Equal seeds give equal figures. Nodes are those of
simulator/speeds.py. `python -m benchmarks.placement` compares the price with fixed splits.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from kvrelay.load.workloads import SCALE, TRACE_BLOCK_TOKENS, WORKLOADS, read_trace
from kvrelay.simulator.setting import Setting
from kvrelay.simulator.stream import at_load, streams_of
from kvrelay.simulator.summary import Summary, summary_of, table
from kvrelay.simulator.world import simulate
from kvrelay.wire.router_config import POLICY_NAMES, PRICE

__all__ = ["main"]

_SCALE_POLICIES = (PRICE, "least_queue")
_AGES_MS = (0.0, 100.0, 500.0, 1_000.0, 2_000.0)
_REPLICAS = (1, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One cell of a comparison: which requests, and how they are served."""

    workload: str
    requests: int
    setting: Setting
    load: float | None = None
    trace: Path | None = None


def run(each: Run) -> Summary:
    """Serve them."""
    setting = each.setting
    if each.trace is not None:
        asks = read_trace(each.trace, each.requests or None)
        work_ms = sum(setting.speeds.prompt_ms(asked.prompt) for asked in asks)
        streams = at_load(asks, work_ms / setting.prefill / (each.load or 1.0))
    else:
        workload = SCALE if each.workload == SCALE.name else WORKLOADS[each.workload]
        if each.load is not None:
            workload = dataclasses.replace(workload, load=each.load)
        streams = streams_of(workload, each.requests, setting.prefill, setting.seed, setting.speeds)
    # Looking for cycles among a million living objects would take a third of the time.
    gc.disable()
    try:
        return summary_of(each.workload, simulate(streams, setting))
    finally:
        gc.enable()
        gc.collect()


def comparison(arguments: argparse.Namespace) -> list[Run]:
    """All workloads, each with all policies."""
    runs = []
    names = (
        [*WORKLOADS, *(["trace"] if arguments.trace else [])]
        if arguments.workloads is None
        else arguments.workloads
    )
    for name in names:
        traced = name == "trace"
        block_size = TRACE_BLOCK_TOKENS if traced else WORKLOADS[name].block_size
        for policy in arguments.policies or POLICY_NAMES:
            setting = dataclasses.replace(_setting(arguments), policy=policy, block_size=block_size)
            requests = arguments.requests or (0 if traced else 4_000)
            runs.append(
                Run(name, requests, setting, arguments.load, arguments.trace if traced else None)
            )
    return runs


def scale(arguments: argparse.Namespace) -> list[Run]:
    """1,000 nodes and 100,000 streams, by one router and by eight, with reports of several ages."""
    requests, first = (
        arguments.requests or 100_000,
        dataclasses.replace(_setting(arguments), prefixes=False),
    )
    settings = [
        dataclasses.replace(first, policy=policy, routers=routers, stale_ms=stale_ms)
        for policy in arguments.policies or _SCALE_POLICIES
        for routers in ([arguments.routers] if arguments.routers else _REPLICAS)
        for stale_ms in (_AGES_MS if arguments.stale is None else [arguments.stale])
    ]
    return [Run(SCALE.name, requests, setting, arguments.load) for setting in settings]


def _setting(arguments: argparse.Namespace) -> Setting:
    prefill, decode = arguments.nodes or ((500, 500) if arguments.scale else (8, 8))
    return Setting(
        prefill=prefill,
        decode=decode,
        routers=arguments.routers or 1,
        stale_ms=arguments.stale or 0.0,
        seed=arguments.seed,
        shortest_first=not arguments.fcfs,
    )


def _nodes(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    if not (prefill.isdigit() and decode.isdigit() and int(prefill) and int(decode)):
        raise argparse.ArgumentTypeError(f"give P:D, as in 8:8, got {text!r}")
    return int(prefill), int(decode)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--scale", action="store_true", help="1,000 nodes, 100,000 streams, old reports, replicas"
    )
    names = [*WORKLOADS, "trace"]
    parser.add_argument(
        "--workloads", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    known = ", ".join(POLICY_NAMES)
    parser.add_argument(
        "--policies", nargs="+", choices=POLICY_NAMES, metavar="NAME", help=f"of {known}"
    )
    parser.add_argument(
        "--trace", type=Path, help="a trace in Mooncake's format, JSON lines, plain or .gz"
    )
    parser.add_argument(
        "--requests", type=int, help="of each run: 4,000, a whole trace, or 100,000 with --scale"
    )
    parser.add_argument(
        "--nodes", type=_nodes, metavar="P:D", help="prefill and decode nodes: 8:8, or 500:500"
    )
    parser.add_argument("--routers", type=int, help="replicas: 1; with --scale 1 and 8")
    parser.add_argument(
        "--stale", type=float, metavar="MS", help="age of the reports: 0; with --scale 0 to 2,000"
    )
    parser.add_argument(
        "--load",
        type=float,
        help="of the prefill nodes if nothing were cached; else each workload's own",
    )
    parser.add_argument(
        "--fcfs", action="store_true", help="prefill nodes serve in the order of arrival"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args(argv)
    if arguments.workloads and "trace" in arguments.workloads and arguments.trace is None:
        parser.error("give --trace with the workload trace")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for, and print a table."""
    arguments = _arguments(argv)
    runs = scale(arguments) if arguments.scale else comparison(arguments)
    began, summaries = time.perf_counter(), []
    with ProcessPoolExecutor(arguments.jobs) as processes:
        for summary in processes.map(run, runs) if arguments.jobs > 1 else map(run, runs):
            summaries.append(summary)
            print(
                f"{len(summaries)} of {len(runs)}, {time.perf_counter() - began:.0f} s",
                end="\r",
                file=sys.stderr,
                flush=True,
            )
    print(file=sys.stderr)
    print(table(summaries, scale=arguments.scale))
    return 0


if __name__ == "__main__":
    sys.exit(main())
