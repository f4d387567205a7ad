"""What is told of a run: a table for people."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.soak.chaos.lookout import Size
from tests.soak.chaos.run import Result
from tests.soak.chaos.verdict import Times

__all__ = ["print_table"]

_SHOWN = 20


def print_table(options: argparse.Namespace, result: Result) -> None:
    cluster, verdict, facts = result.cluster, result.verdict, result.facts
    blows = {id(each.fault): each.fault for each in cluster.struck if not each.missed}
    struck = Counter(fault.kind for fault in blows.values())
    without = ", ".join(
        f"{seconds:.1f} s without a {role} node" for role, seconds in facts["without_s"].items()
    )
    recovered = result.recovered
    rows = {
        "seed": f"{options.seed}, {options.prefill}P{options.decode}D, {options.streams} streams",
        "faults": f"{struck.total()}: {_listed(struck)}; {without}",
        "requests": f"{_listed(verdict.ends)} in {facts['seconds']:.0f} s",
        "equal by kind": _listed(verdict.equal_by_kind),
        "nonsense": f"answered with {_listed(result.rude.answers)}",
        "told honestly": _listed(verdict.honest),
        "failed over": f"{verdict.failed_over}; {result.rude.preemptions} preemptions",
        "gap at a fail-over": _row(verdict.gap_ms),
        "longest gap of others": _row(verdict.undisturbed_gap_ms),
        "first token": _row(verdict.first_token_ms),
        "up after a fault": _row(Times.of(each.up_s for each in recovered if each.up_s)),
        "a leg after a fault": _row(Times.of(each.leg_s for each in recovered if each.leg_s)),
    }
    for name, (before, after) in facts["sizes"].items():
        rows[name] = f"{_shown(before)} -> {_shown(after)}"
    for name, row in rows.items():
        print(f"{name:22} {row}")
    for what in verdict.broken[:_SHOWN]:
        print(f"BROKEN {what}")
    print(f"{len(verdict.broken)} promises broken")


def _shown(size: Size | None) -> str:
    if size is None:
        return "-"
    return (
        f"{size.memory >> 20} MiB, {size.files} files, {size.sockets} sockets, {size.threads} "
        f"threads"
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing"


def _row(times: Times) -> str:
    return f"p50 {times.p50:8.0f}  p99 {times.p99:8.0f}  max {times.max:8.0f} ms"
