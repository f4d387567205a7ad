"""`kvrelay bench`: the progress bar, the table and the result of a load (kvrelay.load)."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import Experiment, RunProgress
from kvrelay.load.measures import server_failures
from kvrelay.load.report import cells_of, warnings_of, write_report
from kvrelay.load.results import Made, Result, read_result, write_result
from kvrelay.machine import installed
from kvrelay.settings import build
from kvrelay.wire.config_checks import is_loopback
from kvrelay.wire.errors import ConfigError

__all__ = ["result_of", "run"]

_COLUMNS = (
    "rate", "per GPU", "answered/s", "met", "goodput/GPU", "TTFT p50 p99", "TPOT p50 p99", "ITL p50 p99", "E2E p50 p99",
    "tokens/s", "cached", "failed",
)  # fmt: skip
_SMI = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_SMI_DEADLINE_S = 20.0


def run(values: dict[str, Any], console: Console) -> int:
    """Run the command and return 1 if a request failed. Raises ConfigError, KvrelayError."""
    compare, files = values.pop("compare"), [Path(each) for each in values.pop("files") or ()]
    if files and not compare:
        raise ConfigError(f"{files[0]}: files are named with --compare only")
    if compare:
        return _compare(files, values, console)
    config = build(BenchConfig, values)
    path = Path(config.output)
    if path.suffix != ".json":
        raise ConfigError(
            f"output {config.output!r} must end with .json; the report beside it ends with .html"
        )
    if not config.seed:
        config = dataclasses.replace(
            config, seed=time.time_ns() // 1_000_000
        )  # no server has seen its prompts
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
    )
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    experiment, began = Experiment(config, _teller(bar)), datetime.datetime.now(datetime.UTC)
    try:
        with bar:
            asyncio.run(experiment.run())
    finally:  # what was measured is kept, whatever ended the rest
        if experiment.runs:
            result = result_of(config, experiment, began)
            write_result(result, path)
            write_report([result], path.with_suffix(".html"))
            _show([result], console)
            console.print(f"[dim]{path} and {path.with_suffix('.html')} are written[/]")
    return int(any(server_failures(each.measures) for each in experiment.runs))


def _compare(files: Sequence[Path], values: Mapping[str, object], console: Console) -> int:
    if len(files) < 2:
        raise ConfigError(
            "--compare wants two results or more: kvrelay bench --compare a.json b.json"
        )
    other = set(values) - {"output"}
    if other:
        raise ConfigError(
            f"--compare measures nothing; leave --{sorted(other)[0].replace('_', '-')} out"
        )
    results = [read_result(path) for path in files]
    target = Path(str(values.get("output", "compare.html"))).with_suffix(".html")
    write_report(results, target)
    _show(results, console)
    console.print(f"[dim]{target} is written[/]")
    return 0


def _teller(bar: Progress) -> Callable[[RunProgress], None]:
    tasks: dict[str, TaskID] = {}

    def told(said: RunProgress) -> None:
        if said.name not in tasks:
            tasks[said.name] = bar.add_task(said.name, total=said.total_s or said.requests, said="")
        of = said.progress
        failed = f", [red]{of.failed} failed[/]" if of.failed else ""
        text = f"{of.done} of {of.sent} answered{failed}"
        task = bar.tasks[bar.task_ids.index(tasks[said.name])]
        done = min(task.elapsed or 0.0, said.total_s) if said.total_s else float(of.done)
        bar.update(tasks[said.name], completed=done, said=text)

    return told


def result_of(config: BenchConfig, experiment: Experiment, began: datetime.datetime) -> Result:
    """Return what an experiment has measured so far."""
    server = experiment.server
    assert server is not None
    host = urlsplit(config.base_urls[0]).hostname or ""
    return Result(
        label=config.label or server.model,
        model=server.model,
        url=config.url,
        gpus=config.gpus,
        hardware=config.hardware or (_gpus_here() if is_loopback(host) else ""),
        lengths=_lengths(config),
        arrivals=_arrivals(config),
        work=config.work,
        slo=config.slo,
        attainment=config.attainment,
        made=Made(
            _command(),
            began.isoformat(timespec="seconds"),
            _machine(),
            _versions(server.version),
            config.seed,
        ),
        runs=experiment.runs,
        found=experiment.found,
        endpoint=config.endpoint,
    )


def _lengths(config: BenchConfig) -> str:
    if config.trace or config.sharegpt:
        return Path(config.trace or config.sharegpt).name
    of = config.work
    spread = f", spread {of.spread:g}" if of.spread else ""
    turns = f", {of.turns} turns" if of.turns > 1 else ""
    return f"{config.lengths}: {of.prompt:,} tokens in, {of.output:,} out{spread}{turns}"


def _arrivals(config: BenchConfig) -> str:
    if config.clients:
        return f"{config.clients} clients, closed loop"
    burst = f" (variation {config.variation:g})" if config.arrivals == "bursty" else ""
    return f"{config.arrivals} arrivals{burst}, open loop"


def _command() -> str:
    words, hidden = ["kvrelay", *sys.argv[1:]], "--api-key"
    shown = ["***" if at and words[at - 1] == hidden else word for at, word in enumerate(words)]
    return shlex.join(
        [f"{hidden}=***" if word.startswith(f"{hidden}=") else word for word in shown]
    )


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _versions(server: str) -> dict[str, str]:
    known = installed()
    return {name: known[name] or "" for name in ("kvrelay", "python", "uvloop")} | {
        "server": server
    }


def _gpus_here() -> str:
    try:
        told = subprocess.run(
            _SMI, capture_output=True, text=True, timeout=_SMI_DEADLINE_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    names = [line.strip() for line in told.splitlines() if line.strip()]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _show(results: Sequence[Result], console: Console) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    several = len(results) > 1
    for name in ["label", *_COLUMNS] if several else _COLUMNS:
        table.add_column(name, justify="left" if name == "label" else "right")
    for each in results:
        for measured in sorted(each.runs, key=lambda one: (one.concurrency, one.offered)):
            cells = _narrow(cells_of(each, measured))
            table.add_row(*([each.label, *cells] if several else cells))
    console.print(table)
    for each in results:
        for warning in warnings_of(each):
            console.print(Text(warning, style="red"))
        for measured in each.runs:
            for example in measured.measures.examples:
                console.print(Text(f"{each.label}: {example}", style="red"))
        if each.found is not None:
            console.print(_found(each))


def _narrow(cells: Sequence[str]) -> list[str]:
    pairs = [" ".join(cells[at : at + 2]) for at in range(5, 13, 2)]
    return [*cells[:5], *pairs, *cells[13:]]


def _found(result: Result) -> Text:
    found = result.found
    assert found is not None
    if not found.holds:
        return Text(
            f"{result.label}: no rate held{f' ({found.why})' if found.why else ''}", style="red"
        )
    broke = f"; {found.breaks:.3g} did not" if found.breaks is not None else ""
    said = f" ({found.why})" if found.why else ""
    return Text(
        f"{result.label}: {found.holds:.3g} requests/s held, {found.holds / result.gpus:.3g} per "
        f"GPU, at {result.attainment:.0%} attainment{broke}{said}"
    )
