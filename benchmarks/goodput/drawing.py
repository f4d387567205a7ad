"""The table and the plot of all that was measured, and of what others were seen to do. Pure but for
reading files.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.goodput.measuring import WANTED, Held, difference, held, judged, met_share
from benchmarks.goodput.works import GAP_MS, PHYSICS, VLLM, VLLM_SOURCE, WORKS, Fixed
from kvrelay.load.results import Result, Run, read_result
from kvrelay.load.svg import Line, Mark, drawing
from kvrelay.wire.errors import ConfigError

__all__ = ["Measured", "drawn", "read_folders", "tables"]

_RELAY, _COLOCATED = "relay", ("direct", "routed")


@dataclass(frozen=True, slots=True)
class Measured:
    """A work by an arm: all of its runs, from however many files."""

    work: str
    arm: str
    result: Result


def read_folders(folders: Iterable[Path]) -> list[Measured]:
    """All results in them; those of one work and label are one. Raises ConfigError if there is
    none, or if those of a work cannot be compared.
    """
    found: dict[tuple[str, str, str], Result] = {}
    for path in sorted(path for folder in folders for path in folder.glob("*-*.json")):
        work, _, arm = path.stem.rpartition("-")
        result = read_result(path)
        key = (work, arm, result.label)
        for (other, *_), seen in found.items():
            if other == work and (why := difference(seen, result)):
                raise ConfigError(f"{path} cannot stand beside the other results of {work}: {why}")
        if key in found:
            result = msgspec.structs.replace(result, runs=[*found[key].runs, *result.runs])
        found[key] = result
    if not found:
        raise ConfigError(f"no results in {', '.join(map(str, folders))}")
    return [Measured(work, arm, result) for (work, arm, _), result in found.items()]


# --- tables
# ----------------------------------------------------------------------------------------------------------


def tables(found: Sequence[Measured]) -> str:
    """In Markdown: the highest rates beside each other, then all probes."""
    works = _works(found)
    lines = [
        "Requests per second and GPU at which 90 % meet their targets:",
        "",
        "| work | targets | vLLM 0.26 | colocated servers | prefill and decode nodes | more | "
        "physics, aim |",
        "|---|---|---|---|---|---|---|",
    ]
    for work in works:
        of = [each for each in found if each.work == work]
        lines += [_best_row(work, of, smooth=False), _best_row(work, of, smooth=True)]
    lines += ["", f"{VLLM_SOURCE}", "", *_all_runs(found)]
    return "\n".join(lines)


def _best_row(work: str, of: Sequence[Measured], *, smooth: bool) -> str:
    slo = of[0].result.slo
    targets = (
        f"TTFT {slo.ttft_ms:g} ms, TPOT {slo.tpot_ms:g} "
        f"ms{f', no gap above {GAP_MS:g} ms' if smooth else ''}"
    )
    ours = _best([each for each in of if each.arm == _RELAY], smooth=smooth)
    colocated = _best([each for each in of if each.arm in _COLOCATED], smooth=smooth)
    other = _theirs(work, of)
    theirs = "" if other is None else (other.smooth if smooth else other.rate)
    more = (
        f"{ours[0].rate / colocated[0].rate - 1:+.0%}"
        if ours[0].known and colocated[0].known
        else ""
    )
    physics = PHYSICS.get(f"{work}, smooth" if smooth else work) if other is not None else None
    aim = f"{physics[0]:g}, {physics[1]:g}" if physics else ""
    asked = of[0].result.work
    name = f"{work} {asked.prompt:,} / {asked.output:,}"
    return f"| {name} | {targets} | {theirs} | {colocated[1]} | {ours[1]} | {more} | {aim} |"


def _works(found: Sequence[Measured]) -> list[str]:
    """In the order of WORKS; others behind them."""
    names = [*WORKS, *sorted(each.work for each in found)]
    return [name for name in dict.fromkeys(names) if any(each.work == name for each in found)]


def _theirs(work: str, of: Sequence[Measured]) -> Fixed | None:
    """Figures of others, if that is what they were asked."""
    usual, asked = WORKS.get(work), of[0].result.work
    same = usual is not None and (usual.lengths.prompt, usual.lengths.output) == (
        asked.prompt,
        asked.output,
    )
    return VLLM.get(work) if same else None


def _best(of: Sequence[Measured], *, smooth: bool) -> tuple[Held, str]:
    """What several arms hold per GPU: the best of them, which may be any that is not known to
    break; and each of them in words.
    """
    told: list[tuple[Held, str]] = []
    for each in of:
        seen = held(each.result.runs, smooth=smooth, gpus=each.result.gpus)
        if not seen.rate and seen.breaks is None:
            continue
        low = min(judged(each.result.runs, smooth=smooth), key=lambda run: run.rate)
        share = "" if seen.rate else f": {met_share(low, smooth=smooth):.0%}"
        told.append((seen, f"{seen}{share} ({each.result.label})"))
    told.sort(key=lambda one: one[0].rate, reverse=True)
    breaks = [seen.breaks for seen, _ in told if seen.breaks is not None]
    best = Held(
        max((seen.rate for seen, _ in told), default=0.0),
        max(breaks) if 0 < len(breaks) == len(told) else None,
    )
    return best, "; ".join(words for _, words in told) or "not measured"


def _all_runs(found: Sequence[Measured]) -> list[str]:
    lines = [
        "| work | served by | requests/s per GPU | requests | met | smooth, too | TTFT p50, p90, "
        "p99 ms | "
        "TPOT p50, p90 | ITL p99 | longest gap of an answer p90 | failed | sent late p99 ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        lines += [_run_row(each, run) for run in sorted(each.result.runs, key=lambda run: run.rate)]
    return lines


def _run_row(each: Measured, run: Run) -> str:
    of = run.measures
    gaps = sorted(row.gap_ms for row in run.rows if not row.failure)
    gap = f"{gaps[math.ceil(0.9 * len(gaps)) - 1]:.0f}" if gaps else ""
    cells = [
        each.work,
        each.result.label,
        f"{run.rate / each.result.gpus:.3g}",
        f"{of.requests:,}",
        f"{met_share(run, smooth=False):.1%}{'' if judged([run], smooth=False) else ' (client too slow)'}",
        f"{met_share(run, smooth=True):.1%}",
        ", ".join(f"{ms:,.0f}" for ms in (of.ttft_ms.p50, of.ttft_ms.p90, of.ttft_ms.p99)),
        f"{of.tpot_ms.p50:.1f}, {of.tpot_ms.p90:.1f}",
        f"{of.itl_ms.p99:.1f}",
        gap,
        ", ".join(f"{count} {kind}" for kind, count in of.failures.items()) or "0",
        f"{of.client.late.p99:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


# --- the plot
# --------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _TITLE, _LEGEND = 640, 330, 30, 40
_COLOURS = {"relay": 0, "direct": 1, "routed": 2, "vllm": 3, "serve": 4}
_STYLE = (
    "text{font:12px "
    "system-ui,sans-serif;fill:#5a6475}.title{font-size:14px;font-weight:600;fill:#1b212c}"
    ".grid{stroke:#dfe3ea;fill:none}.mark{stroke:#5a6475;stroke-dasharray:5 4;fill:none}"
    ".line{fill:none;stroke-width:2}.dashed{stroke-dasharray:7 4}.dot{stroke:none}"
    ".line.s0{stroke:#3b5bdb}.dot.s0{fill:#3b5bdb}.line.s1{stroke:#c9660f}.dot.s1{fill:#c9660f}"
    ".line.s2{stroke:#16794a}.dot.s2{fill:#16794a}.line.s3{stroke:#b0247a}.dot.s3{fill:#b0247a}"
    ".line.s4{stroke:#0b7285}.dot.s4{fill:#0b7285}"
)


def drawn(found: Sequence[Measured]) -> str:
    """An SVG with a plot for each work, and one for answers without gaps: attainment against rate
    per GPU.
    """
    works = _works(found)
    panels = [(work, False) for work in works]
    panels += [(work, True) for work in works if work == "summarise" or len(works) == 1]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width, height = columns * _WIDTH, rows * (_HEIGHT + _TITLE) + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Requests that met their targets, by rate per GPU"><style>{_STYLE}</style>'
        '<rect width="100%" height="100%" fill="white"/>'
    ]
    for at, (work, smooth) in enumerate(panels):
        x, y = at % columns * _WIDTH, at // columns * (_HEIGHT + _TITLE)
        of = [each for each in found if each.work == work]
        asked = of[0].result.work
        title = (
            f"{work} {asked.prompt:,} / "
            f"{asked.output:,}{f', no gap above {GAP_MS:g} ms' if smooth else ''}"
        )
        parts.append(f'<text class="title" x="{x + 62}" y="{y + 20}">{html.escape(title)}</text>')
        inner = _panel(work, of, smooth=smooth)
        parts.append(
            inner.replace(
                "<svg ", f'<svg x="{x}" y="{y + _TITLE}" width="{_WIDTH}" height="{_HEIGHT}" ', 1
            )
        )
    parts += _legend(found, height - 14)
    return "".join([*parts, "</svg>\n"])


def _panel(work: str, of: Sequence[Measured], *, smooth: bool) -> str:
    lines = []
    for each in of:
        runs = sorted(judged(each.result.runs, smooth=smooth), key=lambda run: run.rate)
        points = [(run.rate / each.result.gpus, met_share(run, smooth=smooth)) for run in runs]
        lines.append(Line(each.result.label, points, dots=True, colour=_colour(each)))
    other = _theirs(work, of)
    if other is not None and not smooth:
        lines.append(
            Line(other.name, other.points, dots=True, dashed=True, colour=_COLOURS["vllm"])
        )
    marks = [Mark("90%", y=WANTED)]
    return drawing(
        work, "requests/s per GPU", "met their targets", lines, marks, y_most=1.04, percent=True
    )


def _colour(each: Measured) -> int:
    return _COLOURS["serve"] if "serve" in each.result.label else _COLOURS.get(each.arm, 5)


def _legend(found: Sequence[Measured], y: int) -> list[str]:
    named = {
        "prefill and decode nodes behind the router": 0,
        "colocated, asked in turn": 1,
        "colocated, behind the router": 2,
        "vLLM 0.26, one GPU": 3,
        "kvrelay serve": 4,
    }
    used = {_colour(each) for each in found} | {_COLOURS["vllm"]}
    parts, x = [], 62
    for name, colour in named.items():
        if colour in used:
            parts.append(f'<circle class="dot s{colour}" cx="{x}" cy="{y - 4}" r="5"/>')
            parts.append(f'<text x="{x + 10}" y="{y}">{html.escape(name)}</text>')
            x += 30 + 7 * len(name)
    return parts
