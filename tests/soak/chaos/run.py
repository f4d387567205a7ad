"""One run: a cluster is started, its undisturbed answers are kept, then it is struck under load,
and judged.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.cluster.previous_release import code_of
from tests.cluster.real_cluster import attentive_model
from tests.soak.chaos.asks import CONTEXT, asks
from tests.soak.chaos.crowd import KEPT_S, Crowd
from tests.soak.chaos.faults import Fault, endless, once
from tests.soak.chaos.left_behind import LEASE_S, Size, grown, left_behind, sizes_apart
from tests.soak.chaos.processes import Cluster
from tests.soak.chaos.shim import Shim
from tests.soak.chaos.strikes import Strikes
from tests.soak.chaos.verdict import (
    Outage,
    Span,
    failed_over,
    judged,
    logged_ends,
    meets,
    none_up,
)

__all__ = ["run"]

GAP_S = 60.0
"""Nobody waits longer between two parts of an answer."""
_MORE = Size(0, 64 << 20, 48, 48, 16)
"""What a process may grow by from the quiet before the faults to the quiet after them: buffers and
heaps that a crush has stretched, connections that are kept. Each of thousands of requests would
leave one if it left any.
"""
_ENGINE_BYTES = 200 << 20
"""An engine may grow by more: torch and its allocator keep what the largest batch has needed."""
_DRAIN_S = 20.0
"""A router that is to end then ends what is still under way."""
_BETWEEN_S = 0.3
_CALM_S = 2.0
"""Load at the end, when all is well again: the last ones recover, too."""


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report; `broken` has the promises that were not kept.

    Raises RuntimeError if the cluster does not even start, or answers wrongly without faults, or if
    a kind was asked for that cannot be done here.
    """
    flags = f"--max-num-seqs 256 --lease-s {LEASE_S} --tool-call-parser hermes"
    cluster = Cluster(
        folder,
        [*attentive_model(folder, CONTEXT, kv_mib=options.pool_mib), *flags.split()],
        [f"--drain-deadline-s={_DRAIN_S:g}", *(["--strict-roles"] if options.rolling else [])],
        Shim(folder),
    )
    if options.commit:
        old = code_of(options.commit, folder / "old")
        cluster.code = {"prefill": old, "decode": old}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
    ) as session:
        try:
            await cluster.start(options.prefill, options.decode, session)
            cluster.code = {}
            asked = asks(options.seed, options.per_kind, options.longest)
            crowd = Crowd(cluster.router.url, asked, session)
            await crowd.ask_twins(at_once=8)
            try:
                return await _disturbed(options, cluster, crowd)
            finally:
                await crowd.close()
        finally:
            await cluster.stop()


async def _disturbed(options: argparse.Namespace, cluster: Cluster, crowd: Crowd) -> dict[str, Any]:
    quiet = await sizes_apart(cluster)
    strikes = Strikes(cluster, crowd)
    faults = _faults(options, cluster, strikes)
    began = time.monotonic()
    cluster.supervise()
    going = True
    clients = [
        asyncio.create_task(
            crowd.keep_asking(random.Random(f"{options.seed} {at}"), lambda: going),
            name=f"client {at}",
        )
        for at in range(options.streams)
    ]
    await _strike_all(options, cluster, strikes, faults, began)
    try:
        await cluster.whole()
        await asyncio.sleep(_CALM_S)
    except RuntimeError as why:
        cluster.surprises.append(str(why))
    going = False
    cluster.surprises += await _failures(clients)
    ended = time.monotonic()
    left = await left_behind(cluster)
    for node in cluster.every:
        node.rises(ended)  # who is down still is so until the end of what is judged
    await asyncio.sleep(2.5 * KEPT_S)  # idle connections of clients are none that have grown
    after = await sizes_apart(cluster)
    no_decode = none_up([*node.down, *node.away] for node in cluster.nodes if node.role == "decode")
    logs = {node.name: node.log.read_text(errors="replace").splitlines() for node in cluster.every}
    report = _judged(cluster, crowd, logs["router"], no_decode)
    report["broken"] += [
        *left,
        *_grown(quiet, after),
        *cluster.surprises,
        *(
            f"{name}'s log: {line}"
            for name, log in logs.items()
            for line in log
            if "Traceback" in line
        ),
    ]
    blows = {id(each.fault): each.fault.kind for each in cluster.struck if not each.missed}
    return {
        "seconds": ended - began,
        "faults": Counter(blows.values()),
        "preemptions": strikes.preemptions,
        **report,
    }


def _faults(options: argparse.Namespace, cluster: Cluster, strikes: Strikes) -> Iterator[Fault]:
    nodes = range(len(cluster.nodes))
    if options.rolling:
        return (Fault(0.0, "restart", (at,)) for at in nodes)
    able = [kind for kind in strikes.kinds() if not options.kind or kind in options.kind]
    if unable := set(options.kind).difference(able):
        raise RuntimeError(
            f"cannot be done here, without a C compiler: {', '.join(sorted(unable))}"
        )
    if options.each_once:
        return iter(once(options.seed, nodes, able, longest_s=options.every_s))
    drawn = endless(options.seed, options.every_s, nodes, able)
    return takewhile(lambda each: each.at < options.seconds, drawn)


async def _strike_all(
    options: argparse.Namespace,
    cluster: Cluster,
    strikes: Strikes,
    faults: Iterator[Fault],
    began: float,
) -> None:
    one_by_one = options.each_once or options.rolling
    made: list[Fault] = []
    under_way: list[asyncio.Task[None]] = []
    told = time.monotonic()
    for fault in faults:
        if cluster.lost():
            break
        at = time.monotonic()
        pause_s = options.every_s if one_by_one else began + fault.at - at
        if options.each_once and made:  # until the one before is over, and some answers have begun
            pause_s = min(pause_s, made[-1].for_s + _BETWEEN_S)
        await asyncio.sleep(pause_s)
        if one_by_one:
            try:
                await cluster.whole()  # so that nobody is spared
            except RuntimeError as why:
                cluster.surprises.append(f"before {fault.kind}: {why}")
                break
        made.append(fault)
        under_way.append(
            asyncio.create_task(strikes.strike(fault), name=f"{fault.kind} at {fault.at:.1f} s")
        )
        if at - told > 60:
            told = at
            print(f"{at - began:.0f} s: {len(made)} faults", file=sys.stderr, flush=True)
    cluster.surprises += await _failures(under_way)
    if one_by_one:
        happened = {id(each.fault) for each in cluster.struck if not each.missed}
        cluster.surprises += [
            f"{fault.kind} has not happened" for fault in made if id(fault) not in happened
        ]
    elif not cluster.lost():
        await asyncio.sleep(began + options.seconds - time.monotonic())


async def _failures(of: Sequence[asyncio.Task[None]]) -> list[str]:
    ends = await asyncio.gather(*of, return_exceptions=True)
    return [
        f"{task.get_name()} failed: {why!r}"
        for task, why in zip(of, ends, strict=True)
        if why is not None
    ]


def _judged(
    cluster: Cluster, crowd: Crowd, log: list[str], no_decode: list[Span]
) -> dict[str, Any]:
    drains = {
        each.at
        for each in cluster.struck
        if each.fault.kind == "restart router" and not each.missed
    }
    no_router = [
        Outage(a, b, a + _DRAIN_S if a in drains else None) for a, b in cluster.router.down
    ]
    stalls = [
        (each.at, each.at + each.fault.for_s)
        for each in cluster.struck
        if each.fault.kind == "log stall" and each.node == "router"
    ]
    apart = [[*node.down, *node.away] for node in cluster.nodes]
    verdict = judged(crowd.seen, no_decode, GAP_S, no_router, apart)
    verdict.failed_over = failed_over(log)
    if lost := crowd.asked - len(crowd.seen):
        verdict.broken.append(f"{lost} requests have no end at all")
    ends, spans = logged_ends(log), [(a - 1.0, b + 2.0) for a, b in [*cluster.router.down, *stalls]]
    verdict.broken += [
        f"{each.kind} {each.number}, id {each.id}: the router told {ends[each.id]} times of its end"
        for each in crowd.seen
        if each.id and ends[each.id] != 1 and not meets(each.began, each.ended, spans)
    ]
    told: dict[str, Any] = msgspec.to_builtins(verdict)
    return told


def _grown(before: dict[str, Size], after: dict[str, Size]) -> list[str]:
    engines = {name: size for name, size in after.items() if name.endswith("engine")}
    others = {name: size for name, size in after.items() if name not in engines}
    larger = replace(_MORE, memory=_ENGINE_BYTES)
    return [*grown(before, others, _MORE), *grown(before, engines, larger)]
