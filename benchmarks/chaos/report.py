"""What is told of a run: a table for people, and all that is worth keeping of it."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

import msgspec

from benchmarks.chaos.crowd import Crowd
from benchmarks.chaos.processes import Cluster
from benchmarks.chaos.verdict import Times, Verdict

__all__ = ["print_table", "whole"]

_SHOWN = 20


def print_table(options: argparse.Namespace, cluster: Cluster, verdict: Verdict, facts: dict[str, Any]) -> None:
    """A row for each thing that is measured or promised."""
    struck = Counter(each.fault.kind for each in cluster.struck if not each.missed)
    restarts = sum(node.starts - 1 for node in cluster.nodes)
    requests = sum(verdict.ends.values())
    without = ", ".join(f"{seconds:.1f} s without a {role} node" for role, seconds in facts["without_s"].items())
    print(f"seed {options.seed}, {options.prefill}P{options.decode}D, {options.streams} streams at a time")
    print(f"{'faults':20} {struck.total()}: {_listed(struck)}; {restarts} restarts; {without}")
    print(f"{'requests':20} {requests} in {facts['seconds']:.0f} s, {verdict.ends['done']} equal to their twins")
    print(f"{'  by kind':20} {_listed(verdict.equal_by_kind)}")
    print(
        f"{'  others':20} {_listed(verdict.ends - Counter(done=verdict.ends['done'])) or 'none'}; {facts['lost']} lost"
    )
    for what, count in verdict.honest.most_common():
        print(f"{'  told honestly':20} {count} times: {what}")
    print(f"{'failed over':20} {verdict.failed_over} requests")
    for name, times in (
        ("gap at a fail-over", verdict.gap_ms),
        *((f"  {kind}", times) for kind, times in verdict.gap_ms_by_fault.items()),
        ("longest gap of others", verdict.undisturbed_gap_ms),
        ("first token", verdict.first_token_ms),
        ("  failed over before", verdict.first_token_failed_over_ms),
    ):
        print(f"{name:20} {_row(times)}")
    first, last = facts["router_memory"]
    print(f"{'router memory':20} {first / 2**20:.0f} to {last / 2**20:.0f} MiB")
    for what in verdict.broken[:_SHOWN]:
        print(f"BROKEN {what}")
    print(f"{len(verdict.broken)} promises broken")


def whole(
    options: argparse.Namespace, cluster: Cluster, crowd: Crowd, verdict: Verdict, facts: dict[str, Any]
) -> dict[str, Any]:
    """Of JSON's types; moments are seconds since the first stream began."""
    began = facts["began"]
    return {
        "seed": options.seed,
        "options": vars(options),
        **msgspec.to_builtins(verdict),
        **facts,
        "faults": [
            {**asdict(each.fault), "at": each.at - began, "node": each.node, "missed": each.missed}
            for each in cluster.struck
        ],
        "down": {node.name: [[a - began, b - began] for a, b in node.down] for node in cluster.nodes},
        "not_done": [
            {**asdict(each), "began": each.began - began, "ended": each.ended - began, "body": crowd.body(each.number)}
            for each in crowd.seen
            if each.end != "done"
        ],
    }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _row(times: Times) -> str:
    return f"p50 {times.p50:8.0f}  p99 {times.p99:8.0f}  max {times.max:8.0f} ms"
