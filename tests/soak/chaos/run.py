"""One run: a cluster is started, its undisturbed answers are kept, then it is struck under load,
and judged.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from tests.soak.chaos.asks import asks
from tests.soak.chaos.crowd import KEPT_S, Crowd
from tests.soak.chaos.faults import Fault, Schedule, drawn, endless, once
from tests.soak.chaos.left_behind import LEASE_S, left_behind
from tests.soak.chaos.lookout import Lookout, Recovery, Size, grown, recoveries, sizes_apart
from tests.soak.chaos.model import flags_of
from tests.soak.chaos.processes import Cluster
from tests.soak.chaos.rude import Rude
from tests.soak.chaos.shim import Shim
from tests.soak.chaos.strikes import Strikes
from tests.soak.chaos.verdict import (
    MARGIN_S,
    Outage,
    Span,
    Verdict,
    broken_legs,
    joined,
    judged,
    logged_ends,
    meets,
    none_up,
)

__all__ = ["Result", "run"]

GAP_S = 60.0
"""Nobody waits longer between two parts of an answer."""
_MORE = Size(0, 64 << 20, 48, 48, 16)
"""What a process may grow by from the quiet before the faults to the quiet after them: buffers and
heaps that a crush has stretched, connections that are kept. Each of thousands of requests would
leave one if it left any.
"""
_DRAIN_S = 20.0
"""Of a router that is to end: from then on it ends what is still under way."""
_CALM_S = 2.0
"""Of load at the end, when all is well again: the last ones recover, too."""
_CHANGES_BYTES = 200 << 20
"""Of an engine: torch and its allocator keep what the largest batch has needed."""


@dataclass
class Result:
    """What is known at the end."""

    verdict: Verdict
    cluster: Cluster
    crowd: Crowd
    rude: Rude
    recovered: list[Recovery]
    facts: dict[str, Any]


async def run(
    options: argparse.Namespace, folder: Path, schedule: Schedule | None, made: list[Fault]
) -> Result:
    """`made`: each fault is written there when it is made, however the run ends. Raises
    RuntimeError if the cluster does not even start, or answers wrongly without faults, or if a kind
    was asked for that cannot be done here.
    """
    flags = [*flags_of(options.model, folder), "--cpu", "--threads", "1", "--max-num-seqs", "256"]
    flags += [
        "--kv-cache-memory-bytes",
        str(options.pool_mib << 20),
        "--lease-s",
        str(LEASE_S),
        "--tool-call-parser",
        "hermes",
    ]
    cluster = Cluster(folder, flags, ["--drain-deadline-s", f"{_DRAIN_S:g}"], Shim(folder))
    timeout, connector = (
        aiohttp.ClientTimeout(total=None),
        aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
    )
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as session:
        try:
            await cluster.start(options.prefill, options.decode, session)
            assert cluster.router is not None
            asked = asks(options.seed, options.per_kind, options.longest)
            crowd = Crowd(cluster.router.url, asked, session)
            began = time.monotonic()
            await crowd.ask_twins(at_once=8)
            print(f"twins asked in {time.monotonic() - began:.1f} s", flush=True)
            try:
                return await _disturbed(options, cluster, crowd, schedule, made)
            finally:
                await crowd.close()
        finally:
            await cluster.stop()


async def _disturbed(
    options: argparse.Namespace,
    cluster: Cluster,
    crowd: Crowd,
    schedule: Schedule | None,
    made: list[Fault],
) -> Result:
    assert cluster.router is not None
    quiet, index = await sizes_apart(cluster)
    rude, lookout = Rude(cluster, crowd, options.longest), Lookout(cluster)
    strikes = Strikes(cluster, crowd, rude)
    faults = _faults(options, cluster, strikes, schedule)
    began = time.monotonic()
    cluster.supervise()
    watching = asyncio.create_task(lookout.run(), name="the lookout")
    going = True
    clients = [
        asyncio.create_task(
            crowd.keep_asking(random.Random(f"{options.seed} {at}"), lambda: going),
            name=f"client {at}",
        )
        for at in range(options.streams)
    ]
    await _strike_all(options, cluster, strikes, faults, began, made)
    with suppress(RuntimeError):  # what is left behind tells of it
        await cluster.whole()
        await asyncio.sleep(_CALM_S)
    going = False
    cluster.surprises += await _failures(clients)
    ended = time.monotonic()
    left = await left_behind(cluster)
    for node in (*cluster.nodes, cluster.router):
        node.rises(ended)  # who is down still is so until the end of what is judged
    if watching.done():
        cluster.surprises += await _failures([watching])
    watching.cancel()
    facts: dict[str, Any] = {"began": began, "seconds": ended - began}
    await asyncio.sleep(
        2.5 * KEPT_S
    )  # connections of clients that are idle are none that have grown
    after, full = await sizes_apart(cluster)
    facts["index"] = [index, full]
    facts["sizes"] = {name: [quiet.get(name), size] for name, size in after.items()}
    logs = {
        node.name: node.log.read_text(errors="replace").splitlines()
        for node in (*cluster.nodes, cluster.router)
    }
    log = logs["router"]
    without = _none_up(cluster)
    verdict = _judged(options, cluster, crowd, log, without, facts)
    verdict.broken += [
        *left,
        *_grown(quiet, after),
        *cluster.surprises,
        *_unended(cluster, crowd, log),
    ]
    verdict.broken += [
        f"{name}'s log: {line}" for name, of in logs.items() for line in of if "Traceback" in line
    ]
    verdict.broken += [
        each.told
        for each in rude.broken
        if not each.excused(cluster.router.down, without["decode"])
    ]
    recovered = recoveries(cluster, lookout.looks, ended)
    verdict.broken += [
        f"{each.node} was {'not ' if each.up_s is None else ''}up "
        f"{each.up_s or each.watched_s:.1f} s after the end of "
        f"{each.kind} at {each.ended - began:.1f} s"
        for each in recovered
        if each.late
    ]
    return Result(verdict, cluster, crowd, rude, recovered, facts)


def _faults(
    options: argparse.Namespace, cluster: Cluster, strikes: Strikes, schedule: Schedule | None
) -> Iterator[Fault]:
    able = [kind for kind in strikes.kinds() if not options.kind or kind in options.kind]
    if unable := set(options.kind).difference(able):
        raise RuntimeError(
            f"cannot be done here, without a C compiler: {', '.join(sorted(unable))}"
        )
    nodes = range(len(cluster.nodes))
    if schedule is not None:
        return (fault for fault in schedule.faults if fault.kind in able)
    if options.each_once:
        return iter(once(options.seed, options.every_s, nodes, able, longest_s=options.every_s))
    if options.faults:
        return endless(options.seed, options.every_s, nodes, able)
    return iter(drawn(options.seed, options.seconds, options.every_s, nodes, able))


async def _strike_all(
    options: argparse.Namespace,
    cluster: Cluster,
    strikes: Strikes,
    faults: Iterator[Fault],
    began: float,
    made: list[Fault],
) -> None:
    under_way: list[asyncio.Task[None]] = []
    told = time.monotonic()
    for fault in faults:
        if cluster.lost() or (options.faults and _count(cluster) >= options.faults):
            break
        await asyncio.sleep(
            options.every_s if options.each_once else began + fault.at - time.monotonic()
        )
        if options.each_once:
            try:
                await cluster.whole()  # so that nobody is spared
            except RuntimeError:  # what is left behind tells of it
                break
        made.append(fault)
        under_way.append(
            asyncio.create_task(strikes.strike(fault), name=f"{fault.kind} at {fault.at:.1f} s")
        )
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(
                f"{told - began:.0f} s: {_count(cluster)} faults, {len(strikes.crowd.seen)} answers",
                flush=True,
            )
    cluster.surprises += await _failures(under_way)
    if options.each_once:
        happened = {each.fault.kind for each in cluster.struck if not each.missed}
        cluster.surprises += [
            f"{fault.kind} has not happened" for fault in made if fault.kind not in happened
        ]
    elif not (options.faults or cluster.lost()):
        await asyncio.sleep(began + (options.seconds) - time.monotonic())


async def _failures(of: Sequence[asyncio.Task[None]]) -> list[str]:
    ends = await asyncio.gather(*of, return_exceptions=True)
    return [
        f"{task.get_name()} failed: {why!r}"
        for task, why in zip(of, ends, strict=True)
        if why is not None
    ]


def _count(cluster: Cluster) -> int:
    return len({id(each.fault) for each in cluster.struck if not each.missed})


def _judged(
    options: argparse.Namespace,
    cluster: Cluster,
    crowd: Crowd,
    log: list[str],
    without: dict[str, list[Span]],
    facts: dict[str, Any],
) -> Verdict:
    assert cluster.router is not None
    facts["without_s"] = {
        role: sum(max(0.0, b - a - MARGIN_S) for a, b in joined(without[role])) for role in without
    }
    legs = broken_legs(log)
    told_to_end = {
        each.at
        for each in cluster.struck
        if each.fault.kind == "restart router" and not each.missed
    }
    no_router = [
        Outage(a, b, a + _DRAIN_S if a in told_to_end else None) for a, b in cluster.router.down
    ]
    stalls = _router_stalls(cluster)
    verdict = judged(crowd.seen, legs, without["decode"], GAP_S, no_router, stalls)
    if lost := crowd.asked - len(crowd.seen):
        verdict.broken.append(f"{lost} requests have no end at all")
    return verdict


def _none_up(cluster: Cluster) -> dict[str, list[Span]]:
    roles = ("prefill", "decode")
    return none_up(
        {
            role: [[*node.down, *node.away] for node in cluster.nodes if node.role == role]
            for role in roles
        }
    )


def _grown(before: dict[str, Size], after: dict[str, Size]) -> list[str]:
    engines = {name: size for name, size in after.items() if name.endswith("engine")}
    others = {name: size for name, size in after.items() if name not in engines}
    larger = replace(_MORE, memory=_CHANGES_BYTES)
    return [*grown(before, others, _MORE), *grown(before, engines, larger)]


def _router_stalls(cluster: Cluster) -> list[tuple[float, float]]:
    of = [
        each for each in cluster.struck if each.fault.kind == "log stall" and each.node == "router"
    ]
    return [(each.at, each.at + each.fault.for_s) for each in of]


def _unended(cluster: Cluster, crowd: Crowd, log: list[str]) -> list[str]:
    assert cluster.router is not None
    ends = logged_ends(log)
    spans = [
        (a - 1.0, b + 2.0) for a, b in itertools.chain(cluster.router.down, _router_stalls(cluster))
    ]
    return [
        f"{each.kind} {each.number}, id {each.id}: the router told {ends[each.id]} times of its end"
        for each in crowd.seen
        if each.id and ends[each.id] != 1 and not meets(each.began, each.ended, spans)
    ]
