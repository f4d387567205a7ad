"""What a run shows, as figures and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.load.measures import percentile
from kvrelay.planning.planner import NETWORK_MS
from kvrelay.simulator.setting import Result
from kvrelay.simulator.speeds import Speeds
from kvrelay.simulator.stream import Stream

__all__ = ["Summary", "summary_of", "table"]

WARM_UP = 0.1
"""This share of the requests, the first ones, is served and not counted: caches are filled."""
TTFT_MS, TTFT_ALONE, TPOT_MS = 500.0, 2.0, 20.0
"""The aim: the first token within 0.5 s and twice what the prompt takes alone, the others each
within 20 ms.
"""


@dataclass(frozen=True, slots=True)
class Summary:
    """Milliseconds, of what was answered, and shares of 1. Of one run, without its warm-up."""

    workload: str
    policy: str
    routers: int
    stale_ms: float
    requests: int
    refused: int
    """Or given up."""
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
    """The figures of a run."""
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
