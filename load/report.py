"""One or several results as one HTML page that needs no other file: figures, tables, plots."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from kvrelay.load.measures import Percentiles
from kvrelay.load.results import CDF_SHARES, Result, Row, Run
from kvrelay.load.svg import Line, Mark, chart
from kvrelay.wire.errors import ConfigError

__all__ = ["COLUMNS", "cells_of", "page", "warnings_of", "write_report"]

_MOST_CACHED = 0.05
"""Prompts that share nothing but a template have no more cached."""
_MOST_LONGER = 1.2
_MOST_DOTS, _BINS, _MOST_LINES = 1_200, 60, 8
_STYLE = Path(__file__).with_name("report.css")
COLUMNS = (
    "rate", "per GPU", "answered/s", "met", "goodput/GPU", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99",
    "E2E p50", "p99", "tokens/s", "cached", "failed",
)  # fmt: skip
"""The columns of the table of runs: milliseconds, and requests a second."""


def cells_of(result: Result, run: Run) -> list[str]:
    """Return a run as a row of that table."""
    of = run.measures
    failed = sum(of.failures.values())
    rate = (
        f"{run.offered:.4g}"
        if not run.concurrency
        else _count(run.concurrency, "client", "clients")
    )
    spread = [
        _ms(value)
        for each in (of.ttft_ms, of.tpot_ms, of.itl_ms, of.e2e_ms)
        for value in (each.p50, each.p99)
    ]
    per_gpu = f"{run.offered / result.gpus:.4g}"
    return [
        rate, per_gpu, f"{of.achieved_per_s:.4g}", _share(of.attainment), f"{of.goodput_per_s_per_gpu:.3g}", *spread,
        f"{of.output_tokens_per_s:,.0f}", _share(of.cached), f"{failed:,}" if failed else "0",
    ]  # fmt: skip


def page(results: Sequence[Result]) -> str:
    """Return the HTML page."""
    one = results[0] if len(results) == 1 else None
    title = one.label if one else " against ".join(each.label for each in results)
    sections = [_facts(results), *_warnings(results)]
    if one:
        sections.append(_tiles(one))
    sections += [
        _best(results),
        _charts(results),
        *(_runs(each) for each in results),
        _how(results),
    ]
    style = _STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}: kvrelay bench</title><style>{style}</style></head>\n"
        f"<body><header><h1>{_text(title)}</h1></header><main>{''.join(sections)}</main></body></html>\n"
    )


def write_report(results: Sequence[Result], path: Path) -> None:
    """Write the page. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(page(results), encoding="utf-8")
    except OSError as why:
        raise ConfigError(f"cannot write {path}: {why.strerror}") from why


def _facts(results: Sequence[Result]) -> str:
    rows = []
    for each in results:
        told = {
            "Server": f"{each.url}, {each.model}",
            "GPUs": f"{each.gpus}{f' ({each.hardware})' if each.hardware else ''}",
            "Asked": f"{each.lengths}; {each.arrivals}",
            "Targets": _targets(each),
            "Measured": f"{each.made.at} from {each.made.client}",
        }
        name = f"<h2>{_text(each.label)}</h2>" if len(results) > 1 else ""
        terms = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in told.items())
        rows.append(f'<div class="card">{name}<dl>{terms}</dl></div>')
    return f'<section class="facts">{"".join(rows)}</section>'


def _targets(result: Result) -> str:
    slo = result.slo
    gap = f", no gap above {slo.gap_ms:g} ms" if slo.gap_ms else ""
    return (
        f"TTFT {slo.ttft_ms:g} ms, TPOT {slo.tpot_ms:g} ms{gap}; met by "
        f"{result.attainment:.0%} of the requests"
    )


def warnings_of(result: Result) -> list[str]:
    """Return what a reader must know before the figures of a result."""
    said = []
    of = result.work
    shares = bool(of.trace or of.sharegpt or of.turns > 1)
    for run in result.runs:
        name, client = f"{result.label}, {_name(run)}", run.measures.client
        if client.bottleneck:
            said.append(
                f"{name}: the client was too slow, so these figures are not the server's: "
                f"{client.bottleneck}"
            )
        if run.short:
            said.append(f"{name}: {run.rate:.4g} were wanted, and fewer came")
        if not shares and run.measures.cached > _MOST_CACHED:
            said.append(
                f"{name}: the server had {run.measures.cached:.0%} of the prompts cached, which "
                "share nothing; take another --seed"
            )
    if not all(run.measures.usage for run in result.runs):
        said.append(f"{result.label}: answers without usage; their tokens are counted by chunks")
    return said


def _warnings(results: Sequence[Result]) -> list[str]:
    said = []
    for each in results:
        said += warnings_of(each)
        if each.found is not None and each.found.why:
            said.append(f"{each.label}: {each.found.why}")
    if differing := _differing(results):
        said.append(f"These results are not of the same {' and '.join(differing)}.")
    return [f'<p class="warning">{_text(each)}</p>' for each in said]


def _differing(results: Sequence[Result]) -> list[str]:
    endpoints = {each.endpoint for each in results if each.endpoint}  # older files do not say it
    windows = [each.shown.window_s for each in results]
    unlike = {
        "work": len({each.work for each in results}) > 1,
        "endpoint": len(endpoints) > 1,
        "arrivals": len({each.arrivals for each in results}) > 1,
        "targets": len({(each.slo, each.attainment) for each in results}) > 1,
        f"counted time ({min(windows):.0f} to {max(windows):.0f} s)": max(windows)
        > _MOST_LONGER * min(windows),
    }
    return [what for what, is_so in unlike.items() if is_so]


def _tiles(result: Result) -> str:
    run = result.shown
    of = run.measures
    tiles = [("goodput per GPU", f"{of.goodput_per_s_per_gpu:.3g}", "requests/s")]
    if result.found is not None:
        holds = result.found.holds / result.gpus
        tiles = [("highest rate per GPU", f"{holds:.3g}" if holds else "none", "requests/s")]
    tiles += [
        ("met their targets", _share(of.attainment), f"at {_name(run)}"),
        ("TTFT p99", _ms(of.ttft_ms.p99), "ms"),
        ("TPOT p99", _ms(of.tpot_ms.p99), "ms"),
        ("ITL p99", _ms(of.itl_ms.p99), "ms"),
        ("tokens per GPU", f"{of.output_tokens_per_s_per_gpu:,.0f}", "per second"),
    ]
    cards = "".join(
        f'<div class="tile"><span class="soft">{_text(name)}</span><b>{_text(value)}</b>'
        f'<span class="soft">{_text(unit)}</span></div>'
        for name, value, unit in tiles
    )
    return f'<section class="tiles">{cards}</section>'


def _best(results: Sequence[Result]) -> str:
    if len(results) == 1:
        return ""
    rows = [(each.label, [_found(each), *cells_of(each, each.shown)]) for each in results]
    return (
        "<section><h2>Each at its best</h2><p class=soft>The fastest run whose requests met their "
        f"targets, or the first one.</p>{_table(('highest rate/GPU', *COLUMNS), rows)}</section>"
    )


def _found(result: Result) -> str:
    return "" if result.found is None else f"{result.found.holds / result.gpus:.3g}"


def _runs(result: Result) -> str:
    ordered = sorted(result.runs, key=lambda run: (run.concurrency, run.offered))
    rows = [("", cells_of(result, run)) for run in ordered]
    said = [
        f"<li>{_text(_name(run))}: {_text('; '.join(run.measures.examples))}</li>" for run in ordered
        if run.measures.examples
    ]  # fmt: skip
    broken = f"<h3>What failed</h3><ul>{''.join(said)}</ul>" if said else ""
    return (
        f"<section><h2>{_text(result.label)}: all "
        f"runs</h2>{_table(COLUMNS, rows)}{broken}</section>"
    )


def _table(columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    named = any(name for name, _ in rows)
    head = "".join(f"<th>{_text(name)}</th>" for name in (*([""] if named else []), *columns))
    body = "".join(
        "<tr>" + (f"<th>{_text(name)}</th>" if named else "") + "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows
    )  # fmt: skip
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# --- plots
# -----------------------------------------------------------------------------------------------------------


def _charts(results: Sequence[Result]) -> str:
    plots = []
    if any(len(each.runs) > 1 for each in results):
        plots.append(_attainment(results))
    if len(results) == 1:
        shown = [(_name(run), run) for run in _some(results[0].runs)]
        plots += _over_time(results[0])
    else:
        shown = [(each.label, each.shown) for each in results]
    requests = "share of all requests"
    every = (
        ("ttft", "TTFT", requests), ("tpot", "TPOT", requests), ("itl", "ITL", "share of all gaps"),
        ("e2e", "Whole answer", requests),
    )  # fmt: skip
    for name, words, of in every:
        lines = [
            Line(label, _cumulated(run, name), colour=at)
            for at, (label, run) in enumerate(shown)
            if run.cdfs.get(name)
        ]
        target = {
            "ttft": results[0].slo.ttft_ms,
            "tpot": results[0].slo.tpot_ms,
            "itl": results[0].slo.gap_ms,
        }
        marks = [Mark("target", x=target[name])] if target.get(name) else []
        plots.append(
            chart(
                f"{words}, {of}", "ms", "share", lines, marks, log_x=True, y_most=1.0, percent=True
            )
        )
    return f'<section class="charts">{"".join(plots)}</section>'


def _cumulated(run: Run, name: str) -> list[tuple[float, float]]:
    answered = 1.0 if name == "itl" else run.measures.answered / max(1, run.measures.requests)
    return [(ms, share * answered) for ms, share in zip(run.cdfs[name], CDF_SHARES, strict=False)]


def _some(runs: Sequence[Run]) -> list[Run]:
    ordered = sorted(runs, key=lambda run: (run.concurrency, run.offered))
    if len(ordered) <= _MOST_LINES:
        return ordered
    return [
        ordered[round(at * (len(ordered) - 1) / (_MOST_LINES - 1))] for at in range(_MOST_LINES)
    ]


def _attainment(results: Sequence[Result]) -> str:
    lines = []
    for at, each in enumerate(results):
        runs = sorted(
            (run for run in each.runs if run.measures.requests), key=lambda run: run.offered
        )
        points = [(run.offered / each.gpus, run.measures.attainment) for run in runs]
        told = [f"{each.label}, {_name(run)}: {run.measures.attainment:.1%}" for run in runs]
        lines.append(Line(each.label, points, dots=True, colour=at, told=told))
    marks = [Mark(f"{results[0].attainment:.0%}", y=results[0].attainment)]
    found = [
        each.found.holds / each.gpus
        for each in results
        if each.found is not None and each.found.holds
    ]
    marks += [Mark(f"{each:.3g}", x=each) for each in found] if len(results) == 1 else []
    return chart(
        "Requests that met their targets",
        "requests/s per GPU",
        "share",
        lines,
        marks,
        y_most=1.04,
        percent=True,
    )


def _over_time(result: Result) -> list[str]:
    run = result.shown
    rows = [row for row in run.rows if not row.failure]
    start = run.warm_up_s
    plots = []
    for words, of, target in (
        ("TTFT", _ttft, result.slo.ttft_ms),
        ("TPOT", _tpot, result.slo.tpot_ms),
    ):
        points = [
            (row.due_s - start, ms) for row in rows if (ms := of(row))
        ]  # an answer of one chunk has no TPOT
        lines = [
            Line("", _thinned(points), line=False, dots=True, faint=True, colour=0),
            Line("median", _binned(points, 0.5), colour=0),
            Line("slowest", _binned(points, 1.0), colour=1),
        ]
        title = f"{words} over time, {_name(run)}"
        plots.append(chart(title, "s", "ms", lines, [Mark("target", y=target)]))
    return plots


def _ttft(row: Row) -> float:
    return row.ttft_ms


def _tpot(row: Row) -> float:
    return row.tpot_ms


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    each = max(1, math.ceil(len(points) / _MOST_DOTS))
    return [
        max(points[at : at + each], key=lambda point: point[1])
        for at in range(0, len(points), each)
    ]


def _binned(points: list[tuple[float, float]], share: float) -> list[tuple[float, float]]:
    if not points:
        return []
    size = max(1, math.ceil(len(points) / _BINS))
    size = max(size, 5)
    found = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        values = sorted(value for _, value in part)
        value = values[max(0, math.ceil(share * len(values)) - 1)]
        found.append((sum(when for when, _ in part) / len(part), value))
    return found


def _how(results: Sequence[Result]) -> str:
    cards = []
    behind = all(run.after_s for each in results for run in each.runs)
    kept = "; requests after the counted time keep the load up" if behind else ""
    for each in results:
        client = each.shown.measures.client
        versions = ", ".join(
            f"{name} {value}" for name, value in each.made.versions.items() if value
        )
        processes = _count(client.processes, "process", "processes")
        late = (
            "" if math.isnan(client.late.p99) else f"sent {_late(client.late)} after it was due, "
        )
        cards.append(
            f"<h3>{_text(each.label)}</h3><pre>{_text(each.made.command)}</pre><p>{_text(versions)}. The client: "
            f"{processes}, the busiest took {client.busiest:.0%} of its core; {late}"
            f"read {_late(client.lag)} late.</p>"
        )
    return (
        '<section class="soft"><h2>How it was measured</h2><p>TTFT counts from the moment a '
        "request was due; "
        "TPOT is the mean over the tokens after the first chunk; ITL is the time between two "
        "chunks. A request that "
        "failed, or was not answered when the run was over, has met nothing, and is in no "
        "percentile; plots of shares "
        f"end below 100% for it. Requests of the warm-up do not "
        f"count{kept}.</p>{''.join(cards)}</section>"
    )


def _late(of: Percentiles) -> str:
    return f"{of.p50:.1f} ms (median), {of.p99:.1f} ms (p99)"


def _name(run: Run) -> str:
    return (
        _count(run.concurrency, "client", "clients")
        if run.concurrency
        else f"{run.offered:.4g} requests/s"
    )


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _ms(value: float) -> str:
    if math.isnan(value):
        return "-"
    return (
        f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _text(said: str) -> str:
    return html.escape(said)
