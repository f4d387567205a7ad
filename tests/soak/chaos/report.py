"""What is told of a run: a table for people, and all that is worth keeping of it."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

import msgspec

from tests.soak.chaos.lookout import Recovery, Size
from tests.soak.chaos.run import Result
from tests.soak.chaos.verdict import Times

__all__ = ["print_table", "whole"]

_SHOWN = 20
AIM_S = 1.0
"""From the end of a fault until its node is up again."""


def print_table(options: argparse.Namespace, result: Result) -> None:
    cluster, verdict, facts = result.cluster, result.verdict, result.facts
    blows = {id(each.fault): each.fault for each in cluster.struck if not each.missed}
    struck = Counter(fault.kind for fault in blows.values())
    restarts = sum(node.starts - 1 for node in cluster.nodes)
    requests = sum(verdict.ends.values())
    without = ", ".join(
        f"{seconds:.1f} s without a {role} node" for role, seconds in facts["without_s"].items()
    )
    others = verdict.ends - Counter(done=verdict.ends["done"])
    print(f"seed {options.seed}, {options.prefill}P{options.decode}D, {options.streams} streams")
    print(
        f"{'faults':20} {struck.total()}: {_listed(struck)}; {restarts} restarts of nodes; "
        f"{without}"
    )
    print(
        f"{'requests':20} {requests} in {facts['seconds']:.0f} s, {verdict.ends['done']} equal to "
        f"their twins"
    )
    print(f"{'  by kind':20} {_listed(verdict.equal_by_kind)}")
    print(f"{'  others':20} {_listed(others) or 'none'}; {result.rude.preemptions} preemptions")
    print(f"{'nonsense':20} answered with {_listed(result.rude.answers) or 'nothing'}")
    for what, count in verdict.honest.most_common():
        print(f"{'  told honestly':20} {count} times: {what}")
    print(f"{'failed over':20} {verdict.failed_over} requests")
    for name, times in (
        ("gap at a fail-over", verdict.gap_ms),
        ("longest gap of others", verdict.undisturbed_gap_ms),
        ("first token", verdict.first_token_ms),
    ):
        print(f"{name:20} {_row(times)}")
    _print_recovery(result.recovered)
    for name, (before, after) in facts["sizes"].items():
        print(f"{name:20} {_shown(before)} -> {_shown(after)}")
    index, full = facts["index"]
    print(f"{'  its prefix index':20} {index >> 20} MiB -> {full >> 20} MiB, not counted above")
    for what in verdict.broken[:_SHOWN]:
        print(f"BROKEN {what}")
    print(f"{len(verdict.broken)} promises broken")


def _print_recovery(recovered: list[Recovery]) -> None:
    print("from the end of a fault, until the router has its node up, and a leg on it:")
    for kind in ["", *sorted({each.kind for each in recovered})]:
        of = [each for each in recovered if kind in ("", each.kind)]
        up = [each.up_s for each in of if each.up_s is not None]
        leg = [each.leg_s for each in of if each.leg_s is not None]
        late = sum(seconds > AIM_S for seconds in up)
        print(
            f"  {kind or 'all':18} {len(up):4} up  {_row(Times.of(up))}, {late} later than "
            f"{AIM_S:g} s"
        )
        print(f"  {'':18} {len(leg):4} leg {_row(Times.of(leg))}")


def _shown(size: Size | None) -> str:
    if size is None:
        return "-"
    return (
        f"{size.memory >> 20} MiB, {size.files} files, {size.sockets} sockets, {size.threads} "
        f"threads"
    )


def whole(options: argparse.Namespace, result: Result) -> dict[str, Any]:
    cluster, crowd = result.cluster, result.crowd
    began = result.facts["began"]
    return {
        "seed": options.seed,
        "preemptions": result.rude.preemptions,
        **msgspec.to_builtins(result.verdict),
        **msgspec.to_builtins(result.facts),
        "faults": [
            {
                **msgspec.to_builtins(each.fault),
                "at": each.at - began,
                "node": each.node,
                "missed": each.missed,
            }
            for each in cluster.struck
        ],
        "not_done": [
            {
                **asdict(each),
                "began": each.began - began,
                "ended": each.ended - began,
                "body": crowd.body(each.number),
            }
            for each in crowd.seen
            if each.end not in ("done", "left")
        ],
    }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _row(times: Times) -> str:
    return f"p50 {times.p50:8.0f}  p99 {times.p99:8.0f}  max {times.max:8.0f} ms"
