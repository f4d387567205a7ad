"""What a simulation, and a router's decision in it, cost as a cluster grows: half of the nodes prefill, half decode.

python -m benchmarks.growth [--nodes 100 1000 10000] [--requests 20000]

CPU time of one process; requests come at 85 % of what the prefill nodes can do, by one router. A decision is all that
the router does to place a request (router/walk/placer.py), timed one by one over nodes that have work.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Sequence

from load.measures import percentile
from load.workloads import SCALE
from router.walk.placer import Found
from simulator.engine import Engine
from simulator.routers import Router
from simulator.setting import Setting
from simulator.speeds import H200, Speeds
from simulator.stream import Stream, streams_of
from simulator.world import simulate
from wire.config import Role

__all__ = ["decisions_us", "main"]

_CALLS, _EACH = 2_000, 4


def decisions_us(nodes: int) -> list[float]:
    """Return the microseconds of decisions over so many nodes with work, in order."""
    half, speeds = nodes // 2, Speeds(H200)
    roles = [Role.PREFILL] * half + [Role.DECODE] * (nodes - half)
    engines = [Engine(speeds, 128, lambda *_: None, None) for _ in roles]  # type: ignore[arg-type]
    router, took = Router(Setting(prefixes=False), roles, engines, "growth"), []
    for at in range(_CALLS):
        began = time.process_time()
        found = router.find(router.wanted(Stream(0.0, 500 + 37 * at % 977, 100)))
        took.append((time.process_time() - began) * 1e6)
        assert isinstance(found, Found)
        if at < _EACH * nodes:
            router.placer.take(found)
    return sorted(took)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(
        "benchmarks.growth", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args(argv)
    print("| nodes | events/s | us of CPU a request | MiB in all | decision p50 | p99 |")
    print("|---|---|---|---|---|---|")
    for nodes in sorted(arguments.nodes):  # what memory is told is the most that the process ever had
        decisions = decisions_us(nodes)
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
            f"{percentile(decisions, 0.5):.0f} us | {percentile(decisions, 0.99):.0f} us |",
            flush=True,
        )
        del result, streams
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
