"""Tables of cells in Markdown, and the same as values for a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from benchmarks.peer.arms import ARMS
from benchmarks.peer.cells import Cell, Row, difference

__all__ = ["Line", "lines_of", "tables"]

_COMPARED = ("told", "cluster")
_LATE_MS = 20.0


class Line(msgspec.Struct, frozen=True):
    """A row over its seeds."""

    row: Row
    shares: dict[str, float]
    ahead: dict[str, float]
    """Points by which an arm is ahead of the better of colocated and strict, seed by seed."""
    seeds: int
    runs: int
    cells: list[Cell]


def lines_of(cells: Iterable[Cell]) -> list[Line]:
    rows: dict[Row, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(msgspec.structs.replace(cell.row, seed=0), []).append(cell)
    found = []
    for row, own in rows.items():
        shares: dict[int, dict[str, float | None]] = {}
        runs: dict[int, set[str]] = {}
        for cell in own:
            shares.setdefault(cell.row.seed, {})[cell.arm] = cell.figures.in_time
            runs.setdefault(cell.row.seed, set()).add(cell.run)
        met = {arm: _mean(of.get(arm) for of in shares.values()) for arm in ARMS}
        ahead = {arm: _mean(difference(of, arm) for of in shares.values()) for arm in _COMPARED}
        found.append(
            Line(row, _known(met), _known(ahead), len(shares), max(map(len, runs.values())), own)
        )
    return sorted(
        found,
        key=lambda line: (line.row.factor == 0, line.row.after, line.row.work, line.row.factor),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def tables(lines: Sequence[Line]) -> str:
    opened = [line for line in lines if line.row.factor]
    closed = [line for line in lines if not line.row.factor]
    told = [*(_shares(opened) if opened else []), *(_speeds(closed) if closed else [])]
    if any(line.runs > 1 for line in lines):
        told.append(
            "`*`: the arms of this row were measured in several runs, perhaps on several machines."
        )
    late = [
        cell
        for line in lines
        for cell in line.cells
        if (cell.figures.late_p99_ms or 0.0) > _LATE_MS
    ]
    told += [
        f"The client sent late: {cell.row.name} by {cell.arm}, {cell.figures.late_p99_ms:.0f} ms."
        for cell in late
    ]
    return "\n".join(told)


def _shares(lines: Sequence[Line]) -> list[str]:
    arms = [arm for arm in ARMS if any(arm in line.shares for line in lines)]
    compared = [arm for arm in _COMPARED if any(arm in line.ahead for line in lines)]
    told = _head(
        ["requests in time, %", "x", *arms, *(f"{arm} - best" for arm in compared), "seeds"]
    )
    for line in lines:
        after = f" after {line.row.after}" if line.row.after else ""
        shares = [f"{100 * line.shares[arm]:.1f}" if arm in line.shares else "" for arm in arms]
        ahead = [f"{line.ahead[arm]:+.1f}" if arm in line.ahead else "" for arm in compared]
        told.append(
            _line(
                [
                    f"{line.row.work}{after}{_mark(line)}",
                    f"{line.row.factor:g}",
                    *shares,
                    *ahead,
                    f"{line.seeds}",
                ]
            )
        )
    told.append("")
    for arm in compared:
        of = [line for line in lines if arm in line.ahead]
        worst = min(of, key=lambda line: line.ahead[arm])
        mean = fmean(line.ahead[arm] for line in of)
        told.append(
            f"{arm} against the better of colocated and strict: {mean:+.1f} points on average "
            f"over {len(of)} cells, "
            f"{worst.ahead[arm]:+.1f} at worst ({worst.row.work} at {worst.row.factor:g})."
        )
    return [*told, ""]


def _speeds(lines: Sequence[Line]) -> list[str]:
    arms = [arm for arm in ARMS if any(arm == cell.arm for line in lines for cell in line.cells)]
    told = [
        "Output tokens/s; TTFT p50, p99; TPOT p50; ITL p99 (ms):",
        "",
        *_head(["in:out:clients", *arms]),
    ]
    for line in lines:
        of = {cell.arm: cell for cell in line.cells}
        told.append(
            _line(
                [
                    f"{line.row.work}{_mark(line)}",
                    *(_speed(of[arm]) if arm in of else "" for arm in arms),
                ]
            )
        )
    return [*told, ""]


def _speed(cell: Cell) -> str:
    of = cell.figures
    times = [
        f"{_ms(of.ttft_p50_ms)}, {_ms(of.ttft_p99_ms)}",
        _ms(of.tpot_p50_ms),
        _ms(of.itl_p99_ms),
    ]
    rate = f"{of.tokens_per_s:,.0f}" if of.tokens_per_s >= 100 else f"{of.tokens_per_s:.2f}"
    return "; ".join([rate, *times, *([f"{of.failed} failed"] if of.failed else [])])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _mark(line: Line) -> str:
    return " *" if line.runs > 1 else ""


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), _line(["---"] * len(names))]


def _line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"
