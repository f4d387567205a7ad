"""How well the router places, on a virtual clock: the real placement, policies and prefix index,
simulated nodes.

python -m benchmarks.simulate [--trace mooncake_conversation.jsonl.gz]
python -m benchmarks.simulate --scale

The first compares the price and all policies on made-up workloads and, if given, on a trace in the
format that Mooncake has published (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0). The
second serves 100,000 streams on 1,000 nodes with reports of load that are up to 2 s old, by one
router and by eight that share nothing. Equal seeds give equal figures. Nodes are those of
planner/speeds.py. `python -m benchmarks.placement` compares the price with fixed splits.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workloads import BLOCK_TOKENS, WORKLOADS, streams_of
from kvrelay.load.measures import percentile
from kvrelay.load.workloads import TRACE_BLOCK_TOKENS, read_trace
from kvrelay.planner.setting import NETWORK_MS, Result, Setting, Stream, at_load
from kvrelay.planner.speeds import Speeds
from kvrelay.planner.world import simulate
from kvrelay.wire.router_config import POLICY_NAMES, PRICE

__all__ = ["main"]

_SCALE_POLICIES = (PRICE, "least_queue")
_AGES_MS = (0.0, 100.0, 500.0, 1_000.0, 2_000.0)
_REPLICAS = (1, 8)
_NAMES = [name for name in WORKLOADS if name != "scale"]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One cell of a comparison: which requests, and how they are served."""

    workload: str
    requests: int
    setting: Setting
    trace: Path | None = None


def run(each: Run) -> Summary:
    setting = each.setting
    if each.trace is not None:
        asks = read_trace(each.trace, each.requests or None)
        work_ms = sum(setting.speeds.prompt_ms(asked.prompt) for asked in asks)
        streams = at_load(asks, work_ms / setting.prefill)
    else:
        streams = streams_of(
            each.workload, each.requests, setting.prefill, setting.seed, setting.speeds
        )
    # Looking for cycles among a million living objects would take a third of the time.
    gc.disable()
    try:
        return summary_of(each.workload, simulate(streams, setting))
    finally:
        gc.enable()
        gc.collect()


def comparison(arguments: argparse.Namespace) -> list[Run]:
    runs = []
    names = (
        [*_NAMES, *(["trace"] if arguments.trace else [])]
        if arguments.workloads is None
        else arguments.workloads
    )
    for name in names:
        traced = name == "trace"
        block_size = TRACE_BLOCK_TOKENS if traced else BLOCK_TOKENS
        for policy in arguments.policies or POLICY_NAMES:
            setting = dataclasses.replace(_setting(arguments), policy=policy, block_size=block_size)
            requests = arguments.requests or (0 if traced else 4_000)
            runs.append(Run(name, requests, setting, arguments.trace if traced else None))
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
        for stale_ms in _AGES_MS
    ]
    return [Run("scale", requests, setting) for setting in settings]


def _setting(arguments: argparse.Namespace) -> Setting:
    prefill, decode = arguments.nodes or ((500, 500) if arguments.scale else (8, 8))
    return Setting(
        prefill=prefill,
        decode=decode,
        routers=arguments.routers or 1,
        seed=arguments.seed,
    )


def _nodes(text: str) -> tuple[int, int]:
    prefill, decode = map(int, text.split(":"))
    return prefill, decode


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--scale", action="store_true", help="1,000 nodes, 100,000 streams, old reports, replicas"
    )
    names = [*_NAMES, "trace"]
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args(argv)
    if arguments.workloads and "trace" in arguments.workloads and arguments.trace is None:
        parser.error("give --trace with the workload trace")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
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


WARM_UP = 0.1
"""Share of the requests, the first ones, that fill caches and are not counted."""
TTFT_MS, TTFT_ALONE, TPOT_MS = 500.0, 2.0, 20.0
"""The aim: the first token within 0.5 s and twice what the prompt takes alone, the others each
within 20 ms.
"""


@dataclass(frozen=True, slots=True)
class Summary:
    """Milliseconds, of what was answered, and shares of 1."""

    workload: str
    policy: str
    routers: int
    stale_ms: float
    requests: int
    refused: int
    ttft_p50: float
    ttft_p99: float
    ttft_p999: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    cached: float
    good: float
    """The share that has met the aim."""
    good_per_s: float
    preemptions: int


def summary_of(workload: str, result: Result) -> Summary:
    setting, speeds = result.setting, result.setting.speeds
    streams = result.streams[int(len(result.streams) * WARM_UP) :]
    answered = [stream for stream in streams if stream.answered]
    ttft = sorted(stream.ttft + NETWORK_MS for stream in answered) or [0.0]
    tpot = sorted(stream.tpot for stream in answered) or [0.0]
    good = sum(_good(stream, speeds) for stream in streams)
    seconds = max(1e-9, (streams[-1].at - streams[0].at) / 1e3)
    return Summary(
        workload,
        setting.policy,
        setting.routers,
        setting.stale_ms,
        len(streams),
        len(streams) - len(answered),
        percentile(ttft, 0.5),
        percentile(ttft, 0.99),
        percentile(ttft, 0.999),
        percentile(tpot, 0.5),
        percentile(tpot, 0.99),
        result.gap_ms(0.5),
        result.gap_ms(0.99),
        sum(stream.cached for stream in streams) / sum(stream.prompt for stream in streams),
        good / len(streams),
        good / seconds,
        result.preemptions,
    )


def _good(stream: Stream, speeds: Speeds) -> bool:
    most = TTFT_MS + TTFT_ALONE * speeds.prompt_ms(stream.prompt)
    return stream.answered and stream.ttft + NETWORK_MS <= most and stream.tpot <= TPOT_MS


def table(summaries: Sequence[Summary], *, scale: bool) -> str:
    """In Markdown; of a scale run with routers and age of the reports."""
    where = ["policy", "routers", "reports' age"] if scale else ["workload", "policy"]
    shown = ["TTFT p50", "p99", *(["p99.9"] if scale else []), "TPOT p50", "p99", "ITL p50", "p99"]
    head = [*where, *shown, *([] if scale else ["cached"]), "within aims"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for each in summaries:
        cells = (
            [each.policy, f"{each.routers}", f"{each.stale_ms / 1e3:g} s"]
            if scale
            else [each.workload, each.policy]
        )
        cells += [
            f"{each.ttft_p50:,.0f}",
            f"{each.ttft_p99:,.0f}",
            *([f"{each.ttft_p999:,.0f}"] if scale else []),
        ]
        cells += [
            f"{each.tpot_p50:.2f}",
            f"{each.tpot_p99:.2f}",
            f"{each.itl_p50:.2f}",
            f"{each.itl_p99:.2f}",
        ]
        lost = f", {each.refused} not answered" if each.refused else ""
        cells += [
            *([] if scale else [f"{each.cached:.1%}"]),
            f"{each.good:.1%} ({each.good_per_s:,.0f}/s){lost}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
