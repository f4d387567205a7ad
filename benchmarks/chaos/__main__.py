"""Faults at random on a cluster that streams hundreds of answers; each must equal its undisturbed twin.

    python -m benchmarks.chaos --streams 200 --seconds 300 --seed 1

Starts prefill and decode nodes and a router on this machine, asks requests of many kinds, and then asks them again, as
many at a time as --streams says, while nodes are killed, stopped and restarted, two at once now and then, and started
again by a supervisor. Exits with 1 if a promise is broken, and leaves the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos.asks import asks
from benchmarks.chaos.crowd import Crowd
from benchmarks.chaos.faults import Fault, drawn
from benchmarks.chaos.left_behind import LEASE_S, left_behind, memory
from benchmarks.chaos.model import CONTEXT, flags_of
from benchmarks.chaos.processes import Cluster
from benchmarks.chaos.report import print_table, whole
from benchmarks.chaos.verdict import MARGIN_S, broken_legs, joined, judged, none_up

_ROUTER_GROWTH_BYTES = 48 << 20
"""From a quarter of the time on, until the end, what its prefix index holds not counted: more is a leak."""
_LOOK_S = 3.0
_FLAGS = ["--cpu", "--threads", "1", "--kv-cache-memory", str(128 << 20), "--max-running", "256"]


def main() -> int:
    """Command line. Exit code 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200, help="requests under way at any moment")
    parser.add_argument("--seconds", type=float, default=300.0, help="of faults")
    parser.add_argument("--every-s", type=float, default=6.0, help="between two faults, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny", help="tiny, embedded, or what kvrelay's --model takes")
    parser.add_argument("--per-kind", type=int, default=6, help="different requests of each kind")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a long prompt of the tiny model, about")
    parser.add_argument("--gap-s", type=float, default=60.0, help="nobody waits longer between two parts of an answer")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="a request that takes longer hangs")
    parser.add_argument("--flag", action="append", default=[], help="of the nodes")
    parser.add_argument("--router-flag", action="append", default=[], help="of the router")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    options = parser.parse_args()
    if options.longest > CONTEXT - 600:
        parser.error(f"--longest must leave room for the answer in a context of {CONTEXT}")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    report = asyncio.run(_run(options, folder))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")
    if report["broken"]:
        print(f"again: python -m benchmarks.chaos {' '.join(sys.argv[1:])} (seed {options.seed}); logs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


async def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    flags = [*flags_of(options.model, folder), *_FLAGS, "--lease-s", str(LEASE_S), "--tool-call-parser", "hermes"]
    cluster = Cluster(folder, [*flags, *options.flag], options.router_flag)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        try:
            await cluster.start(options.prefill, options.decode, session)
            assert cluster.router is not None
            crowd = Crowd(
                cluster.router.url, asks(options.seed, options.per_kind, options.longest), session, options.deadline_s
            )
            began = time.monotonic()
            await crowd.ask_twins(at_once=8)
            print(f"twins asked in {time.monotonic() - began:.1f} s", flush=True)
            return await _disturbed(options, cluster, crowd)
        finally:
            await cluster.stop()


async def _disturbed(options: argparse.Namespace, cluster: Cluster, crowd: Crowd) -> dict[str, Any]:
    """The streams, the faults, and what both leave behind."""
    began, sizes = time.monotonic(), [await memory(cluster)]
    cluster.supervise()
    watching = asyncio.create_task(_watch(cluster, sizes))
    clients = [
        crowd.keep_asking(random.Random(f"{options.seed} {at}"), lambda: time.monotonic() < began + options.seconds)
        for at in range(options.streams)
    ]
    faults = drawn(options.seed, options.seconds, options.every_s, range(len(cluster.nodes)))
    await asyncio.gather(*clients, *(_strike(cluster, fault, began) for fault in faults))
    seconds = time.monotonic() - began
    watching.cancel()
    sizes.append(await memory(cluster))
    left = await left_behind(cluster)
    assert cluster.router is not None
    log = cluster.router.log.read_text(errors="replace").splitlines()
    down = {role: [node.down for node in cluster.nodes if node.role == role] for role in ("prefill", "decode")}
    without = none_up(down)
    legs = broken_legs(log, time.time() - time.monotonic())
    blows = [(each.at, each.fault.kind, each.url) for each in cluster.struck if not each.missed]
    verdict = judged(crowd.seen, legs, blows, without["decode"], options.gap_s)
    lost, growth = crowd.asked - len(crowd.seen), sizes[-1] - sizes[len(sizes) // 4]
    if lost:
        verdict.broken.append(f"{lost} requests have no end at all")
    if growth > _ROUTER_GROWTH_BYTES:
        verdict.broken.append(f"the router has grown by {growth >> 20} MiB since a quarter of the time")
    verdict.broken += [*left, *cluster.surprises]
    verdict.broken += [f"the router's log: {line}" for line in log if "Traceback" in line]
    facts = {"began": began, "seconds": seconds, "lost": lost, "router_memory": [sizes[0], sizes[-1]]}
    facts["without_s"] = {role: sum(max(0.0, b - a - MARGIN_S) for a, b in joined(without[role])) for role in without}
    print_table(options, cluster, verdict, facts)
    return whole(options, cluster, crowd, verdict, facts)


async def _watch(cluster: Cluster, sizes: list[int]) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        sizes.append(await memory(cluster))


async def _strike(cluster: Cluster, fault: Fault, began: float) -> None:
    await asyncio.sleep(began + fault.at - time.monotonic())
    await cluster.strike(fault)


if __name__ == "__main__":
    sys.exit(main())
