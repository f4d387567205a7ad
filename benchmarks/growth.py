"""What a simulation, and a router's choice in it, cost as a cluster grows: half of the nodes prefill, half decode.

python -m benchmarks.growth [--nodes 100 1000 10000] [--requests 20000]

CPU time of one process; requests come at 85 % of what the prefill nodes can do, by one router with the policy `cost`.
A choice is the real policy's; that of a decode node looks for room, as the real router does.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable, Sequence

from load.workloads import SCALE
from simulator.engine import Engine
from simulator.routers import Router, Way
from simulator.setting import Setting
from simulator.speeds import H200, Speeds
from simulator.stream import Stream, streams_of
from simulator.world import simulate
from wire.config import Role

__all__ = ["main"]

_CALLS = 2_000


def _us(call: Callable[[int], object], times: int) -> float:
    began = time.process_time()
    for at in range(times):
        call(at)
    return (time.process_time() - began) / times * 1e6


def choices(nodes: int) -> tuple[float, float]:
    """Microseconds of a prefill choice and of a decode choice."""
    roles = [Role.PREFILL] * (nodes // 2) + [Role.DECODE] * (nodes - nodes // 2)
    idle = Engine(Speeds(H200), 128, lambda *_: None, None).load(0.0)  # type: ignore[arg-type]
    router = Router(Way("cost", False, 0), roles, [idle] * nodes, "growth")
    streams = [Stream(0.0, 1_000 + at % 977, 100) for at in range(_CALLS)]
    source = _us(lambda at: router.source(streams[at]), _CALLS)
    place = _us(lambda at: router.place(streams[at], 0, lambda _: None), _CALLS)
    return source, place


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(
        "benchmarks.growth", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args(argv)
    print("| nodes | events/s | us of CPU a request | MiB in all | prefill choice | decode choice |")
    print("|---|---|---|---|---|---|")
    for nodes in sorted(arguments.nodes):  # what memory is told is the most that the process ever had
        source, place = choices(nodes)
        half = nodes // 2
        streams = streams_of(SCALE, arguments.requests, half, 0)
        gc.disable()
        began = time.process_time()
        result = simulate(streams, Setting(prefill=half, decode=half, prefixes=False))
        took = time.process_time() - began
        gc.enable()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            f"| {nodes:,} | {result.events / took:,.0f} | {took / len(streams) * 1e6:,.0f} | {memory:,} | "
            f"{source:.0f} us | {place:.0f} us |",
            flush=True,
        )
        del result, streams
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
